import errno
import pickle
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from windlass.amounts import bytes_text
from windlass.storage.integrity.errors import StoreError
from windlass.storage.memory import capacity as room
from windlass.storage.memory.capacity import InsufficientSpaceError


def _v2_group(folder: Path, *, limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 7\n")


def _v1_group(folder: Path, *, limit: int, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 99\ntotal_inactive_file {cache}\n")


class TestCgroups:
    def test_version_2_counts_the_tightest_level_and_not_clean_cache(self, tmp_path: Path) -> None:
        membership = tmp_path / "cgroup"
        membership.write_text("0::/outer/inner\n")
        _v2_group(tmp_path / "fs/outer", limit="1000", used=700, cache=100)
        _v2_group(tmp_path / "fs/outer/inner", limit="max", used=600, cache=0)
        assert room.cgroup_available_nbytes(membership, tmp_path / "fs") == 400

    def test_version_1(self, tmp_path: Path) -> None:
        membership = tmp_path / "cgroup"
        membership.write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
        # Inside a container, the group's folder is the root of the mount.
        _v1_group(tmp_path / "fs/memory", limit=5000, used=4500, cache=500)
        assert room.cgroup_available_nbytes(membership, tmp_path / "fs") == 1000

    def test_group_over_its_limit_has_zero_bytes_available(self, tmp_path: Path) -> None:
        membership = tmp_path / "cgroup"
        membership.write_text("0::/\n")
        _v2_group(tmp_path / "fs", limit="10", used=20, cache=0)
        assert room.cgroup_available_nbytes(membership, tmp_path / "fs") == 0

    def test_no_limit_and_no_cgroups(self, tmp_path: Path) -> None:
        membership = tmp_path / "cgroup"
        assert room.cgroup_available_nbytes(membership, tmp_path) is None
        membership.write_text("0::/a\n")
        _v2_group(tmp_path / "fs/a", limit="max", used=20, cache=0)
        assert room.cgroup_available_nbytes(membership, tmp_path / "fs") is None


class TestMemoryAvailable:
    @pytest.mark.parametrize(("group", "expected"), [(None, 5000), (3000, 3000), (9000, 5000)])
    def test_smaller_of_machine_and_group(
        self, monkeypatch: pytest.MonkeyPatch, group: int | None, expected: int
    ) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
        monkeypatch.setattr(room, "cgroup_available_nbytes", lambda membership, root: group)
        assert room.memory_available_nbytes() == expected

    def test_of_this_machine_is_below_its_total(self) -> None:
        assert 0 < room.memory_available_nbytes() <= psutil.virtual_memory().total


class TestRequire:
    def test_disk_error_tells_needed_free_and_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(InsufficientSpaceError) as caught:
            room.require_disk_room("the states", tmp_path, 1 << 60)
        error = caught.value
        assert error.path == str(tmp_path)
        assert error.needed_nbytes == 1 << 60
        assert 0 < error.free_nbytes < 1 << 60
        assert "1024.00 PiB needed, " in str(error)
        assert f"more than the {bytes_text(error.free_nbytes)} free; delete files there" in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.free_nbytes) == (str(error), error.free_nbytes)

    def test_memory_is_checked_besides_the_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(room, "memory_available_nbytes", lambda: 4095)
        with pytest.raises(InsufficientSpaceError, match=r"in memory for .*4.00 KiB needed, 1 bytes more than the"):
            room.require_arena_room(tmp_path, 4096)

    def test_small_shared_memory_says_how_to_enlarge_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(room, "directory_free_nbytes", lambda directory: 100)
        with pytest.raises(InsufficientSpaceError, match=f"remount,size=... {tmp_path}"):
            room.require_arena_room(tmp_path, 4096)

    def test_require_with_enough_space_passes(self, tmp_path: Path) -> None:
        room.require_disk_room("the states", tmp_path, 1)
        room.require_arena_room(tmp_path, 1)


def test_first_attempt_that_needs_too_much_fails_at_once() -> None:
    too_much, full = InsufficientSpaceError("it", "/", 2, 1, "less"), OSError(errno.ENOSPC, "No space left on device")
    lost = room.RoomLostError("it", "/", 2, 1, "less")
    assert [room.may_find_room_later(too_much, attempt) for attempt in (1, 2)] == [False, True]
    assert [room.may_find_room_later(lost, attempt) for attempt in (1, 2)] == [True, True]
    assert [room.may_find_room_later(full, attempt) for attempt in (1, 2)] == [True, True]
    assert not room.may_find_room_later(ValueError("wrong"), 2)


def test_lack_of_space_is_recognized_in_wrapped_errors() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = StoreError("SSD /ssd0: could not open the volume")
    wrapped.__cause__ = full
    for error in (
        full,
        OSError(errno.EDQUOT, "Quota exceeded"),
        InsufficientSpaceError("it", "/", 2, 1, "less"),
        wrapped,
    ):
        assert room.is_out_of_space(error)
    # An actor's exception that is raised again from Ray's wrapper of it.
    raised, wrapper = StoreError("broken"), RuntimeError("of an actor")
    raised.__cause__, wrapper.cause = wrapper, raised  # type: ignore[attr-defined]
    for other in (None, OSError(errno.EIO, "Input/output error"), RuntimeError("full"), StoreError("broken"), raised):
        assert not room.is_out_of_space(other)
