"""Small checksummed records: a CRC-32 in the last four bytes covers everything before it, padding included."""

import struct
import zlib

from windlass.storage.memory import ALIGNMENT_NBYTES

# A page: what a torn write of an SSD can at most leave half done together.
RECORD_NBYTES = ALIGNMENT_NBYTES

_CRC = struct.Struct("<I")


def seal(payload: bytes, nbytes: int = RECORD_NBYTES) -> bytes:
    """`payload`, padded with zeros to `nbytes` and closed with its checksum."""
    if len(payload) > nbytes - _CRC.size:
        raise ValueError(f"a record of {len(payload)} bytes does not fit into {nbytes - _CRC.size}")
    body = payload.ljust(nbytes - _CRC.size, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def is_intact(raw: bytes, magic: bytes) -> bool:
    """Whether a record begins as it should and its checksum is right: not torn, not damaged, not something else's."""
    return raw.startswith(magic) and _CRC.pack(zlib.crc32(raw[: -_CRC.size])) == raw[-_CRC.size :]
