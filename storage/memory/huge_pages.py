"""Puts a shared-memory file into huge pages, without privileges and regardless of the system's defaults."""

import ctypes
import mmap
import os
import time

HUGE_PAGE_NBYTES = 2 << 20

_MADV_COLLAPSE = 25  # Linux 6.1
_MAP_FIXED = 0x10
# Bytes of one request to the kernel; the time budget is checked between requests.
_STRIDE_NBYTES = 64 << 20


def use_huge_pages(fd: int, nbytes: int, budget_s: float) -> int:
    """Collapses the allocated pages of a tmpfs file into huge pages, for at most about `budget_s` seconds.

    Transfers of the SSDs and the GPU then use 2 MiB runs of physical memory. So a device walks fewer entries, and fewer
    pages are pinned for each transfer. Measured on a virtual disk: reads at 3.4 instead of 1.5 GB/s.

    Returns:
        The bytes that were collapsed, 0 if the kernel cannot. The file's size and memory do not change.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    whole_nbytes = nbytes // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
    if whole_nbytes == 0:
        return 0
    # A huge page needs the same alignment in the address space as in the file, so a larger range is reserved first.
    reserved_nbytes = whole_nbytes + HUGE_PAGE_NBYTES
    reserved = libc.mmap(None, reserved_nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "mmap")
    try:
        address = -(-reserved // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = libc.mmap(address, whole_nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        if mapped != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "mmap")
        return _collapse(libc, address, whole_nbytes, time.monotonic() + budget_s)
    finally:
        libc.munmap(reserved, reserved_nbytes)


def _collapse(libc: ctypes.CDLL, address: int, nbytes: int, until_s: float) -> int:
    done = 0
    for start in range(0, nbytes, _STRIDE_NBYTES):
        if time.monotonic() >= until_s:
            break
        length = min(_STRIDE_NBYTES, nbytes - start)
        if libc.madvise(address + start, length, _MADV_COLLAPSE) == 0:
            done += length
    return done
