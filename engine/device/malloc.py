"""Where the device is the CPU: memory that a step frees stays with the process for the next one.

glibc gives freed memory back to the kernel, which zeroes every page of it again when it is next touched. In a step that
is all that layers keep for the backward pass. A GPU's caching allocator keeps it just so.
"""

import ctypes
import os

# As <malloc.h> has them.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_NEVER = -1  # as an unsigned number it is larger than any memory
# As large as the heaps of which a thread's memory consists: else one that becomes empty is unmapped, whatever the
# threshold says.
_TOP_PAD = 64 << 20
# Memory of its own for every thread. Where two of OpenMP's have the same, as they may where a process has more than
# eight for each core, attention's backward pass took three times as long: small buffers of both lay in one cache line.
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
    """Of the whole process, from now on. Nothing happens without glibc, or where the environment says otherwise."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SET_BY_A_PERSON):
        return
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_TOP_PAD, _TOP_PAD)
    mallopt(_M_ARENA_MAX, _MAX_ARENAS)
    mallopt(_M_MMAP_MAX, 0)  # what is mapped by itself is unmapped when it is freed, however often it is needed
