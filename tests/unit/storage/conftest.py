import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest, tmp_path: Path) -> bool:
    """True to open a store with O_DIRECT; both values, if the temporary directory supports it."""
    if request.param:
        try:
            os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            pytest.skip(f"the file system of {tmp_path} refuses O_DIRECT")
        (tmp_path / "probe").unlink()
    return bool(request.param)


@pytest.fixture
def aligned() -> Callable[[bytes], memoryview]:
    """Copies bytes into memory that starts at a page."""

    def copy(content: bytes) -> memoryview:
        buffer = memoryview(mmap.mmap(-1, len(content)))
        buffer[:] = content
        return buffer

    return copy
