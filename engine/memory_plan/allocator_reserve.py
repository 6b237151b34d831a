"""Counts the GPU memory that PyTorch's allocator takes beside a job's tensors.

A budget limits all that the allocator takes from the GPU (`set_per_process_memory_fraction`). Beside the counted
tensors it takes:

- a workspace of cuBLAS for each pair of handle and stream. A thread has its own handle, and two threads multiply: the
  GPU worker's, and autograd's for the device. cuBLASLt has 1 MiB more for each. `release_device_memory` frees those of
  the thread that checks kernels.
- whole segments: it maps 20 MiB at a time for large tensors, and 2 MiB for those up to 1 MiB.
- gaps between tensors, rounding of sizes, and the own memory of kernels. No count is known for these. On an H100 gaps
  took 2.3 to 3.0 percent of the tensors (docs/decisions/0018-device-memory.md).

Sources: PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp and c10/cuda/CUDACachingAllocator.cpp.
"""

_MIB = 2**20
# Bytes for each thread that multiplies matrices: 32 MiB of cuBLAS on Hopper (8.1 MiB elsewhere), and cuBLASLt's.
_WORKSPACE_NBYTES = 33 * _MIB
_NUM_MULTIPLYING_THREADS = 2
_SEGMENT_NBYTES = (20 + 2) * _MIB  # the ends of a large and of a small segment
_FIXED_NBYTES = _NUM_MULTIPLYING_THREADS * _WORKSPACE_NBYTES + _SEGMENT_NBYTES
_SHARE = 25  # one byte in so many is for gaps, rounding and kernels: 4 percent


def reserved_nbytes(allocated_nbytes: int) -> int:
    """Returns the GPU memory that the allocator takes for a job whose tensors take `allocated_nbytes` at most."""
    return allocated_nbytes + _FIXED_NBYTES + allocated_nbytes // _SHARE


def allocatable_nbytes(limit_nbytes: float) -> int:
    """Returns the bytes that tensors may take on a GPU if the allocator may take `limit_nbytes`.

    `reserved_nbytes` of the result is at most the limit. The result is negative if the reserve alone is larger.
    """
    return (int(limit_nbytes) - _FIXED_NBYTES) * _SHARE // (_SHARE + 1)
