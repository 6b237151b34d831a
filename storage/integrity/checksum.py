"""Checksums of what lies on the SSDs: one for every granule, so that a small read checks no more than it must."""

import xxhash

GRANULE_NBYTES = 1 << 20

# xxhash lets go of the GIL around every call on more than this. Taking it back costs up to 5 ms when another thread
# runs Python (a job in one process), a hundred times the hash itself (measured beside such a thread: 0.2 GB/s with
# calls on whole granules, 12 GB/s so). Between these calls the interpreter still hands the GIL to whoever has waited
# 5 ms.
_UPDATE_NBYTES = 64 << 10


def granule_digests(buffer: memoryview) -> list[int]:
    """XXH3 (64 bits, no seed) of every granule that begins in `buffer`, as unsigned integers; the last may be short.

    Only a multiple of GRANULE_NBYTES from the start of a region do the digests of two buffers line up.
    """
    return [_digest(buffer[start : start + GRANULE_NBYTES]) for start in range(0, buffer.nbytes, GRANULE_NBYTES)]


def _digest(granule: memoryview) -> int:
    state = xxhash.xxh3_64()
    for start in range(0, granule.nbytes, _UPDATE_NBYTES):
        state.update(granule[start : start + _UPDATE_NBYTES])
    return state.intdigest()
