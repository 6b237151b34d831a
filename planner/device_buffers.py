"""How many buffers for params and gradients a device needs, by their size: two of a size let one be filled while the
other is computed with.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

# Gradients of so many blocks may lie on the device, where nobody says otherwise: one is summed while another is copied
# out. With one, the next block's backward pass waits for the copies.
MAX_GRAD_BUFFERS = 2


def param_buffers(
    block_numels: Sequence[int], shared: Sequence[Sequence[int]], *, resident: Collection[int], num_ahead: int
) -> Counter[int]:
    """Buffers by their number of elements: as many as `num_ahead` operations of a step that follow each other need.

    `shared`: per block, the blocks whose params its operation reads. `resident` blocks have their params on the device.
    Where a step, one of its groups of micro-batches or an evaluation ends and the next begins, the first params are
    wanted once more; they wait for a buffer.
    """
    forward = list(range(len(block_numels)))
    operations = forward + forward[-2::-1]
    most: Counter[int] = Counter()
    for start in range(len(operations)):
        blocks = [block for operation in operations[start : start + num_ahead] for block in shared[operation]]
        most |= Counter(block_numels[block] for block in blocks if block not in resident)
    return most


def grad_buffers(block_numels: Mapping[int, int], *, resident: Collection[int], num_waiting: int) -> Counter[int]:
    """Buffers by their number of elements, for the gradients of some blocks that are on the device at once.

    Those of `resident` blocks all stay there until their update; of the others `num_waiting` at most.
    """
    offloaded = Counter(numel for block, numel in block_numels.items() if block not in resident)
    most = Counter({numel: min(num_waiting, number) for numel, number in offloaded.items()})
    return most + Counter(numel for block, numel in block_numels.items() if block in resident)
