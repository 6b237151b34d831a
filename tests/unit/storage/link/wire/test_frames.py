"""Data frames: the bytes that arrive, and what is said of bytes that were changed on their way."""

import os
import socket

import pytest

from tests.support.storage.links import WAIT_S
from windlass.storage.link.wire import DamagedFrame, FrameReader, FrameWriter

PIECE = os.urandom(100)
NUMBER = 7
KEYS = [None, bytes(16)]


def frame_of(key: bytes | None) -> bytes:
    """Returns the bytes of the frame that brings the piece."""
    near, far = socket.socketpair()
    with near, far:
        FrameWriter(near, key, 4096).send(NUMBER, memoryview(PIECE))
        return far.recv(65536)


def receive(frame: bytes, key: bytes | None) -> bytes:
    """Returns the piece that a frame brings."""
    near, far = socket.socketpair()
    into = memoryview(bytearray(len(PIECE)))

    def place(number: int, nbytes: int) -> memoryview:
        assert (number, nbytes) == (NUMBER, len(PIECE)), "bytes of one piece would reach the memory of another"
        return into

    with near, far:
        far.settimeout(WAIT_S)
        near.sendall(frame)
        assert FrameReader(far, key, 4096).receive(place) == NUMBER
    return bytes(into)


@pytest.mark.parametrize("key", KEYS)
def test_frame_brings_its_piece(key: bytes | None) -> None:
    assert receive(frame_of(key), key) == PIECE


@pytest.mark.parametrize("key", KEYS)
def test_frame_with_any_changed_byte_is_damaged(key: bytes | None) -> None:
    frame = frame_of(key)
    for at in range(len(frame)):
        changed = bytearray(frame)
        changed[at] ^= 0x10
        with pytest.raises(DamagedFrame):
            receive(bytes(changed), key)
