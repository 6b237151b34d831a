"""Where the device is the CPU: memory that a step frees stays with the process for the next one.

glibc gives freed memory back to the kernel, which zeroes every page of it again when it is next touched. In a step that
is all that layers keep for the backward pass. A GPU's caching allocator keeps it just so.
"""

import ctypes
import os

# As <malloc.h> has them. The second is the largest that glibc takes: what is larger is mapped, and unmapped, by itself.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER = -1  # as an unsigned number it is larger than any memory
_SET_BY_A_PERSON = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Of the whole process, from now on. Nothing happens without glibc, or where the environment says otherwise."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SET_BY_A_PERSON):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
