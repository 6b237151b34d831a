"""Small checksummed records: a CRC-32 in the last four bytes covers everything before it, padding included."""

import struct
import zlib

from windlass.storage.memory import ALIGNMENT_NBYTES

# Bytes of a record: one page, the largest unit that a torn write can leave partly written.
RECORD_NBYTES = ALIGNMENT_NBYTES

_CRC = struct.Struct("<I")


def seal(payload: bytes, nbytes: int = RECORD_NBYTES) -> bytes:
    """Returns `payload`, padded with zeros and followed by its checksum, `nbytes` in all."""
    if len(payload) > nbytes - _CRC.size:
        raise ValueError(f"a record of {len(payload)} bytes does not fit into {nbytes - _CRC.size}")
    body = payload.ljust(nbytes - _CRC.size, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def is_intact(raw: bytes, magic: bytes) -> bool:
    """Checks a record's first bytes and its checksum. A torn, damaged or foreign record fails."""
    return raw.startswith(magic) and _CRC.pack(zlib.crc32(raw[: -_CRC.size])) == raw[-_CRC.size :]
