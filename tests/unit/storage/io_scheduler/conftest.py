import os
import threading
from collections.abc import Sequence

import pytest

from tests.support.storage.io_bench import WAIT_S, Hang


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Hang:
    """Makes the SSD hang in the first `num_calls` calls of a function of `os`."""

    def replace_call(name: str, num_calls: int = 1000) -> tuple[threading.Event, threading.Event]:
        entered, released = threading.Event(), threading.Event()
        real, calls = getattr(os, name), iter(range(num_calls))

        def call(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if next(calls, None) is not None:
                entered.set()
                assert released.wait(WAIT_S)
            moved: int = real(fd, buffers, offset)
            return moved

        monkeypatch.setattr(os, name, call)
        return entered, released

    return replace_call
