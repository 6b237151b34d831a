import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.job import admission
from windlass.actors.job.admission import arena_free_nbytes, calibration_of, require_room, survey_ssds
from windlass.actors.job.context import JobContext, make_context
from windlass.storage.ids import JobId
from windlass.storage.io.engines import DEFAULT_IO
from windlass.storage.memory import capacity as room
from windlass.storage.memory.capacity import InsufficientSpaceError
from windlass.storage.ssd import volume
from windlass.storage.ssd.calibration import Calibration
from windlass.storage.ssd.volume_format import Demand
from windlass.storage.store.tensor_store import TensorStore

FREE = 2**40


@pytest.fixture
def context(tmp_path: Path) -> JobContext:
    (tmp_path / "shm").mkdir()
    for name in "ab":
        (tmp_path / "disks" / name).mkdir(parents=True)
    spec = make_spec(ssd_dirs=(str(tmp_path / "disks/a"), str(tmp_path / "disks/b")), arena_dir=str(tmp_path / "shm"))
    return make_context(spec, make_layout(3000, 5000, 5000, 100), str(tmp_path / "shm/arena"))


def set_free(monkeypatch: pytest.MonkeyPatch, *, disk: int = FREE, shm: int = FREE, memory: int = FREE) -> None:
    def free_nbytes(directory: Path) -> int:
        return shm if directory.name == "shm" else disk

    monkeypatch.setattr(room, "directory_free_nbytes", free_nbytes)
    monkeypatch.setattr(volume, "directory_free_nbytes", free_nbytes)
    monkeypatch.setattr(room, "memory_available_nbytes", lambda: memory)


def disk_nbytes(context: JobContext) -> int:
    return sum(context.geometry(i).demand.nbytes for i in range(2))


def test_job_that_fits_to_the_byte_is_accepted(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = context.plan.arena_nbytes
    set_free(monkeypatch, disk=disk_nbytes(context), shm=arena, memory=arena)
    require_room(context)
    for name in context.spec.ssd_dirs:
        assert [path.name for path in Path(name).iterdir()] == [volume.VOLUME_FILE]


def test_directories_of_one_disk_are_counted_together(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = disk_nbytes(context)
    set_free(monkeypatch, disk=needed - 1)
    with pytest.raises(InsufficientSpaceError) as caught:
        require_room(context)
    assert (caught.value.needed_nbytes, caught.value.free_nbytes) == (needed, needed - 1)
    assert "1 bytes more than the" in str(caught.value)
    assert caught.value.path == context.spec.ssd_dirs[0]


@pytest.mark.parametrize("scarce", ["shm", "memory"])
def test_an_arena_that_does_not_fit_is_refused(
    scarce: str, context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = context.plan.arena_nbytes
    set_free(monkeypatch, **{scarce: needed - 1})
    with pytest.raises(InsufficientSpaceError) as caught:
        require_room(context)
    assert (caught.value.needed_nbytes, caught.value.free_nbytes) == (needed, needed - 1)
    assert caught.value.path == (context.spec.arena_dir if scarce == "shm" else "memory")
    assert list(Path(context.spec.arena_dir).iterdir()) == []


@pytest.mark.parametrize(("shm", "memory"), [(4000, 8000), (8000, 4000)])
def test_a_job_without_a_budget_leaves_a_quarter_of_what_is_free(
    context: JobContext, monkeypatch: pytest.MonkeyPatch, shm: int, memory: int
) -> None:
    set_free(monkeypatch, shm=shm, memory=memory)
    assert arena_free_nbytes(context.spec) == 3000


def with_activations(context: JobContext, num_slots: int) -> JobContext:
    plan = replace(context.plan, num_ssd_activations=num_slots)
    return replace(context, plan=plan)


def test_activations_on_the_ssds_need_room_too_unless_the_job_holds_it(
    context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = disk_nbytes(context)
    context = with_activations(context, 7)
    set_free(monkeypatch, disk=states + (7 << 20) - 1)
    with pytest.raises(InsufficientSpaceError, match="for the model states and swapped activations") as caught:
        require_room(context)
    assert caught.value.needed_nbytes == states + (7 << 20)
    set_free(monkeypatch)
    for i, name in enumerate(context.spec.ssd_dirs):
        opened = volume.Volume.open(name, direct=False)
        store = TensorStore.create(opened, context.geometry(i))
        store.reserve_scratch(1 << 20, context.num_scratch_slots(i))
        opened.close()
    set_free(monkeypatch, disk=0)
    for num_slots in (0, 3, 7):
        require_room(with_activations(context, num_slots))
    with pytest.raises(InsufficientSpaceError) as caught:
        require_room(with_activations(context, 10))
    assert caught.value.needed_nbytes == 3 << 20


def test_activations_of_each_gpu_worker_need_room_on_the_ssds(
    context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = disk_nbytes(context)
    context = replace(with_activations(context, 7), spec=replace(context.spec, num_ranks=3))
    set_free(monkeypatch, disk=states + (21 << 20) - 1)
    with pytest.raises(InsufficientSpaceError, match="for the model states and swapped activations") as caught:
        require_room(context)
    assert caught.value.needed_nbytes == states + (21 << 20)


def test_directories_of_two_disks_are_counted_apart(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def on_two_disks(self: Path, **options: bool) -> object:
        found = stat(self, **options)
        if str(self) == context.spec.ssd_dirs[1]:
            return type("Stat", (), {"st_dev": found.st_dev + 1, "st_mode": found.st_mode})()
        return found

    monkeypatch.setattr(Path, "stat", on_two_disks)
    set_free(monkeypatch, disk=max(context.geometry(i).demand.nbytes for i in range(2)))
    require_room(context)


class TestSurvey:
    CALIBRATION = Calibration(
        io=DEFAULT_IO,
        read_bytes_per_s=2e9,
        write_bytes_per_s=2e9,
        mixed_bytes_per_s=2e9,
        cpu_s_per_byte=7e-11,
        measured_at="2026-01-01",
    )

    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The sizes of the scratch regions that were measured."""
        sizes: list[int] = []

        def calibrate(device: object, offset: int, nbytes: int) -> Calibration:
            sizes.append(nbytes)
            return self.CALIBRATION

        monkeypatch.setattr(admission, "calibrate", calibrate)
        return sizes

    def test_a_disk_is_measured_once_and_for_all(self, context: JobContext, measured: list[int]) -> None:
        facts = survey_ssds(context.spec, direct=False)
        assert [(each.io, each.weight) for each in facts] == [(DEFAULT_IO, 1)] * 2
        assert len(measured) == 1  # both directories are on it
        assert survey_ssds(context.spec, direct=False) == facts
        assert len(measured) == 1
        for name in context.spec.ssd_dirs:
            opened = volume.Volume.open(name, direct=False)
            assert opened.allocations() == {}
            opened.close()

    def test_missing_directories_are_made_for_their_owner_only(
        self, context: JobContext, measured: list[int], tmp_path: Path
    ) -> None:
        spec = make_spec(ssd_dirs=(str(tmp_path / "new/ssd"),))
        survey_ssds(spec, direct=False)
        assert (tmp_path / "new/ssd").stat().st_mode & 0o777 == 0o700

    def test_a_faster_ssd_gets_more_chunks(self, context: JobContext) -> None:
        for name, rate in zip(context.spec.ssd_dirs, (6e9, 2e9), strict=True):
            opened = volume.Volume.open(name, direct=False)
            opened.keep_calibration(replace(self.CALIBRATION, mixed_bytes_per_s=rate).to_json())
            opened.close()
        first, second = survey_ssds(context.spec, direct=False)
        assert first.weight > 2 * second.weight

    def test_calibration_of_another_version_is_measured_again(self, context: JobContext, measured: list[int]) -> None:
        opened = volume.Volume.open(context.spec.ssd_dirs[0], direct=False)
        opened.keep_calibration({"speed": "high"})
        assert calibration_of(opened) == self.CALIBRATION
        assert measured == [128 << 20]
        assert Calibration.from_json(opened.calibration() or {}) == self.CALIBRATION
        opened.close()

    def test_second_measuring_process_waits_for_first_result(self, context: JobContext, measured: list[int]) -> None:
        name = context.spec.ssd_dirs[0]
        other, mine = volume.Volume.open(name, direct=False), volume.Volume.open(name, direct=False)
        assert other.device.claim()
        found: list[Calibration] = []
        waiting = threading.Thread(target=lambda: found.append(calibration_of(mine)))
        waiting.start()
        other.keep_calibration(self.CALIBRATION.to_json())
        other.device.release()
        waiting.join(30.0)
        assert found == [self.CALIBRATION]
        assert measured == []
        other.close()
        mine.close()

    def test_scratch_of_killed_measuring_process_is_freed(self, context: JobContext, measured: list[int]) -> None:
        opened = volume.Volume.open(context.spec.ssd_dirs[0], direct=False)
        opened.reserve(JobId("calibration"), Demand(head_nbytes=1 << 20, extent_nbytes=1 << 20, num_extents=3))
        calibration_of(opened)
        assert opened.allocations() == {}
        opened.close()
