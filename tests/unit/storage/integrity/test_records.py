import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.storage.integrity.records import RECORD_NBYTES, is_intact, seal

MAGIC = b"WNDLTEST"


@settings(deadline=None)
@given(payload=st.binary(max_size=60), position=st.integers(0, 8 * 128 - 1))
def test_any_flipped_bit_is_seen(payload: bytes, position: int) -> None:
    """Including padding and checksum."""
    raw = bytearray(seal(MAGIC + payload, 128))
    assert len(raw) == 128
    assert raw.startswith(MAGIC + payload)
    assert is_intact(bytes(raw), MAGIC)
    raw[position // 8] ^= 1 << position % 8
    assert not is_intact(bytes(raw), MAGIC)


@settings(deadline=None)
@given(num_sectors=st.integers(0, 7))
def test_torn_record_is_not_intact(num_sectors: int) -> None:
    old, new = seal(MAGIC + b"old"), seal(MAGIC + b"new" * 1000)
    torn = new[: 512 * num_sectors] + old[512 * num_sectors :]
    assert is_intact(torn, MAGIC) == (num_sectors == 0)


@pytest.mark.parametrize("raw", [b"", MAGIC, bytes(RECORD_NBYTES), seal(MAGIC)[:-1], seal(MAGIC)[:512]])
def test_short_or_blank_record_is_not_intact(raw: bytes) -> None:
    assert not is_intact(raw, MAGIC)


def test_another_kind_of_record_is_not_intact() -> None:
    assert not is_intact(seal(b"WNDLELSE"), MAGIC)


def test_payload_fills_all_but_the_checksum() -> None:
    assert is_intact(seal(MAGIC + bytes(128 - 8 - 4), 128), MAGIC)
    with pytest.raises(ValueError, match="a record of 125 bytes does not fit into 124"):
        seal(MAGIC + bytes(128 - 8 - 3), 128)
