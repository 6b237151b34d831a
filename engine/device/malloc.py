"""Makes glibc keep freed memory for the next step, for training on the CPU.

By default glibc returns freed memory to the kernel, which zeroes each page when it is next touched. Each step would pay
this for all activations. On a GPU the caching allocator of PyTorch keeps freed memory in the same way.
"""

import ctypes
import os

# Constants of <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_NEVER = -1  # as an unsigned number it is larger than any memory
# Bytes: the size of a thread arena's heap. With a smaller value glibc unmaps an empty heap regardless of the threshold.
_TOP_PAD = 64 << 20
# The number of arenas: one for every thread. glibc's default is eight for each core. If two OpenMP threads share an
# arena, their small buffers share cache lines, and attention's backward pass takes three times as long.
_MAX_ARENAS = 256
_SET_BY_A_PERSON = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
)


def retain_freed_memory() -> None:
    """Makes the whole process keep freed memory from now on.

    Does nothing without glibc, or if the environment already sets one of these options.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SET_BY_A_PERSON):
        return
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_TOP_PAD, _TOP_PAD)
    mallopt(_M_ARENA_MAX, _MAX_ARENAS)
    mallopt(_M_MMAP_MAX, 0)  # no separate mappings: `free` would always unmap them
