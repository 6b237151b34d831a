from pathlib import Path

import pytest

from tests.unit.actors.specs import make_layout, make_spec
from windlass.actors.admission import require_room
from windlass.actors.context import JobContext, make_context
from windlass.storage import room
from windlass.storage.room import NotEnoughRoom

FREE = 2**40


@pytest.fixture
def context(tmp_path: Path) -> JobContext:
    (tmp_path / "shm").mkdir()
    spec = make_spec(ssd_dirs=(str(tmp_path / "disks/a"), str(tmp_path / "disks/b")), arena_dir=str(tmp_path / "shm"))
    return make_context(spec, make_layout(3000, 5000, 5000, 100), str(tmp_path / "shm/arena"))


def set_free(monkeypatch: pytest.MonkeyPatch, *, disk: int = FREE, shm: int = FREE, memory: int = FREE) -> None:
    def free_nbytes(directory: Path) -> int:
        return shm if directory.name == "shm" else disk

    monkeypatch.setattr(room, "directory_free_nbytes", free_nbytes)
    monkeypatch.setattr(room, "memory_available_nbytes", lambda: memory)


def disk_nbytes(context: JobContext) -> int:
    return sum(context.geometry(i).file_nbytes for i in range(2))


def test_what_fits_to_the_byte_is_taken(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = context.plan.arena_nbytes
    set_free(monkeypatch, disk=disk_nbytes(context), shm=arena, memory=arena)
    require_room(context)
    for name in context.spec.ssd_dirs:
        assert Path(name).stat().st_mode & 0o777 == 0o700
        assert list(Path(name).iterdir()) == []


def test_directories_of_one_disk_are_counted_together(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = disk_nbytes(context)
    set_free(monkeypatch, disk=needed - 1)
    with pytest.raises(NotEnoughRoom) as caught:
        require_room(context)
    assert (caught.value.needed_nbytes, caught.value.free_nbytes) == (needed, needed - 1)
    assert str(needed) in str(caught.value)
    assert caught.value.path == context.spec.ssd_dirs[0]


@pytest.mark.parametrize("scarce", ["shm", "memory"])
def test_an_arena_that_does_not_fit_is_refused(
    scarce: str, context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = context.plan.arena_nbytes
    set_free(monkeypatch, **{scarce: needed - 1})
    with pytest.raises(NotEnoughRoom) as caught:
        require_room(context)
    assert (caught.value.needed_nbytes, caught.value.free_nbytes) == (needed, needed - 1)
    assert caught.value.path == (context.spec.arena_dir if scarce == "shm" else "memory")
    assert list(Path(context.spec.arena_dir).iterdir()) == []


def test_directories_of_two_disks_are_counted_apart(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def on_two_disks(self: Path, **options: bool) -> object:
        found = stat(self, **options)
        if str(self) == context.spec.ssd_dirs[1]:
            return type("Stat", (), {"st_dev": found.st_dev + 1, "st_mode": found.st_mode})()
        return found

    for name in context.spec.ssd_dirs:
        Path(name).mkdir(parents=True)
    monkeypatch.setattr(Path, "stat", on_two_disks)
    set_free(monkeypatch, disk=max(context.geometry(i).file_nbytes for i in range(2)))
    require_room(context)
