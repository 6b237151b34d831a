import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.storage.stores import used_nbytes
from windlass.storage.integrity.errors import DirectIoRefused
from windlass.storage.ssd.device import SsdDevice

MIB = 1 << 20
Aligned = Callable[[bytes], memoryview]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ssd"
    path.touch(mode=0o600)
    return path


def _num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class TestBytes:
    def test_written_is_read_back_by_either_way(self, file: Path, direct: bool, aligned: Aligned) -> None:
        device = SsdDevice(file, direct=direct)
        device.allocate(0, 4 * MIB)
        content = os.urandom(MIB)
        assert device.write(MIB, aligned(content)) == MIB
        device.write_records(0, b"record")
        device.sync()
        found = aligned(bytes(MIB))
        assert device.read(MIB, found) == MIB
        assert found == content
        assert device.read_records(MIB, MIB) == content
        # The page cache must not serve old bytes.
        assert device.write(MIB, aligned(content[::-1])) == MIB
        assert device.read_records(MIB, MIB) == content[::-1]
        assert device.read_records(0, 8) == b"record\0\0"
        device.close()

    def test_end_of_file(self, file: Path, direct: bool, aligned: Aligned) -> None:
        device = SsdDevice(file, direct=direct)
        assert device.read_records(0, 4096) == b""
        device.allocate(0, 8192)
        assert device.nbytes == 8192
        assert device.read(4096, aligned(bytes(8192))) == 4096
        assert device.read(8192, aligned(bytes(4096))) == 0
        assert len(device.read_records(4096, 8192)) == 4096
        device.close()

    def test_short_record_writes_are_completed(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        device = SsdDevice(file, direct=False)
        whole = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, raw, offset: whole(fd, raw[:1000], offset))
        raw = os.urandom(4096)
        device.write_records(100, raw)
        assert device.read_records(100, 4096) == raw
        device.close()


class TestSpace:
    def test_allocated_is_backed_discarded_is_given_back(self, file: Path, aligned: Aligned) -> None:
        device = SsdDevice(file, direct=False)
        device.allocate(0, 4 * MIB)
        assert device.nbytes == 4 * MIB
        assert used_nbytes(file) >= 4 * MIB
        for offset in (0, 2 * MIB):
            device.write(offset, aligned(b"x" * 2 * MIB))
        device.sync()
        device.discard(MIB, 2 * MIB)
        assert used_nbytes(file) < 3 * MIB
        assert device.nbytes == 4 * MIB
        assert device.read_records(MIB - 1, 2) == b"x\0"
        assert device.read_records(3 * MIB - 1, 2) == b"\0x"
        device.truncate(MIB)
        assert device.nbytes == MIB
        assert used_nbytes(file) < 2 * MIB
        device.close()

    def test_raw_device_keeps_its_size_and_bytes(self, file: Path, aligned: Aligned) -> None:
        """A file in place of a device: operations that only files support must not be tried."""
        file.write_bytes(b"x" * MIB)
        device = SsdDevice(file, is_raw=True, direct=False)
        device.allocate(0, 4 * MIB)
        device.discard(0, MIB)
        device.truncate(0)
        assert device.read_records(0, 2 * MIB) == b"x" * MIB
        device.close()

    @pytest.mark.parametrize(
        ("code", "num_calls", "raised"), [(errno.EINTR, 2, False), (errno.EOPNOTSUPP, 1, False), (errno.EIO, 1, True)]
    )
    def test_discard_that_does_not_succeed_at_once(
        self, file: Path, monkeypatch: pytest.MonkeyPatch, code: int, num_calls: int, raised: bool
    ) -> None:
        device = SsdDevice(file, direct=False)
        calls: list[tuple[Any, ...]] = []

        def fallocate(*arguments: Any) -> int:
            calls.append(arguments)
            return -1 if len(calls) == 1 else 0

        monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: SimpleNamespace(fallocate=fallocate))
        monkeypatch.setattr(ctypes, "get_errno", lambda: code)
        if raised:
            with pytest.raises(OSError, match="Input/output error") as caught:
                device.discard(0, MIB)
            assert (caught.value.errno, caught.value.filename) == (code, str(file))
        else:
            device.discard(0, MIB)
        assert len(calls) == num_calls
        device.close()


class TestPresence:
    def test_removed_replaced_and_moved(self, file: Path) -> None:
        device = SsdDevice(file, direct=False)
        assert device.is_present
        file.rename(file.with_name("moved"))
        assert not device.is_present
        file.touch()
        assert not device.is_present
        file.with_name("moved").rename(file)
        assert device.is_present
        device.close()

    def test_vanished_directory(self, tmp_path: Path) -> None:
        directory = tmp_path / "mounted"
        directory.mkdir()
        (directory / "ssd").touch()
        device = SsdDevice(directory / "ssd", direct=False)
        directory.rename(tmp_path / "unmounted")
        assert not device.is_present
        device.close()


class TestLock:
    def test_keeps_other_descriptors_out(self, file: Path) -> None:
        device, other = SsdDevice(file, direct=False), os.open(file, os.O_RDWR)
        with device.lock(), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(RuntimeError, match="inside"), device.lock():
            raise RuntimeError("inside")
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
        device.close()

    def test_keeps_threads_of_one_device_and_of_another_out(self, file: Path) -> None:
        devices = [SsdDevice(file, direct=False) for _ in range(2)]
        inside, most = 0, 0

        def enter(device: SsdDevice) -> None:
            nonlocal inside, most
            for _ in range(100):
                with device.lock():
                    inside += 1
                    most = max(most, inside)
                    os.sched_yield()
                    inside -= 1

        threads = [threading.Thread(target=enter, args=(device,)) for device in devices * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (inside, most) == (0, 1)
        for device in devices:
            device.close()


class TestOpening:
    def test_file_system_without_direct_io_is_refused(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.open

        def refuse(path: Path, flags: int, *arguments: Any, **named: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(path, flags, *arguments, **named)

        monkeypatch.setattr(os, "open", refuse)
        before = _num_open_files()
        with pytest.raises(DirectIoRefused, match=f"{file.parent} refuses O_DIRECT.*choose a directory"):
            SsdDevice(file)
        assert _num_open_files() == before
        SsdDevice(file, direct=False).close()

    def test_other_failures_are_told_as_they_are(self, file: Path) -> None:
        with pytest.raises(FileNotFoundError):
            SsdDevice(file.with_name("none"))

    def test_close_leaves_no_descriptor(self, file: Path) -> None:
        before = _num_open_files()
        SsdDevice(file, direct=False).close()
        assert _num_open_files() == before
