"""The sizes of the optimizer's temporary tensors. It imports no torch, because the planner needs them."""

from windlass.storage.ids import StatePrecision

# Elements of a slice of a fused update on a GPU: 16 MiB of fp32. A slice takes longer than its launches, and its copies
# stay small.
DEVICE_SLICE_NUMEL = 2**22
# Bytes of temporary tensors for each element of a slice.
_SCRATCH_ITEMSIZE = {StatePrecision.FP32: 8, StatePrecision.SPLIT: 25, StatePrecision.BF16: 34}
# Elements of a piece that `portable_squared_norms` squares at a time. The sums' bits depend on this number.
PORTABLE_NUMEL = 2**18
# Pieces that it sums at once on a GPU: its kernels are then few, and long enough to hide their launches. On a CPU it is
# one, whose sums stay in the caches. The bits do not depend on this number.
NUM_PIECES_AT_ONCE = 4
# Bytes that it uses at most, in fp64: the sums of these pieces on a GPU, and on a CPU a piece's squares and sums.
NORM_SCRATCH_NBYTES = 8 * PORTABLE_NUMEL * NUM_PIECES_AT_ONCE


def update_scratch_nbytes(states: StatePrecision) -> int:
    """Returns the memory that an update on a GPU takes for temporary tensors. A compiled kernel takes none."""
    return _SCRATCH_ITEMSIZE[states] * DEVICE_SLICE_NUMEL
