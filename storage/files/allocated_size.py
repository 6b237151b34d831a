"""Asks the file system how much disk space a part of a file has.

Source: Linux, Documentation/filesystems/fiemap.rst.
"""

import errno
import fcntl
import struct

_FS_IOC_FIEMAP = 0xC020660B
_HEAD = struct.Struct("=QQIIII")  # start, length, flags, extents found, room for extents, reserved
_EXTENT = struct.Struct("=QQQQQIIII")  # offset in the file, offset on the disk, length, reserved, flags, reserved
_MAX_EXTENTS = 256  # extents in one request
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL)


def backed_nbytes(fd: int, start: int, nbytes: int) -> int | None:
    """Returns the bytes of a file's range that have disk space, written or not; None if the file system can't say."""
    at, stop, found = start, start + nbytes, 0
    while at < stop:
        request = bytearray(_HEAD.size + _MAX_EXTENTS * _EXTENT.size)
        _HEAD.pack_into(request, 0, at, stop - at, 0, 0, _MAX_EXTENTS, 0)
        try:
            fcntl.ioctl(fd, _FS_IOC_FIEMAP, request)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return None
            raise
        num_extents = _HEAD.unpack_from(request)[3]
        if num_extents == 0:
            break
        for i in range(num_extents):
            first, _, length, *_ = _EXTENT.unpack_from(request, _HEAD.size + i * _EXTENT.size)
            end = min(first + length, stop)
            found += max(0, end - max(first, at))
            at = max(at, end)
    return found
