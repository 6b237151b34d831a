"""The steps whose states and gradients a store accepts, holds and commits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.storage.direct_store import DirectStore
from tests.support.storage.stores import (
    FP32,
    JOB,
    LARGE,
    check,
    check_gradient,
    commit,
    content,
    fill,
    gradient,
    keys,
    make_geometry,
    new_store,
    open_volume,
    page_aligned,
    resume,
    states,
)
from windlass.storage.ids import Attempt, BlockIndex, ChunkIndex, ChunkKey, SsdIndex, StateKind, Step
from windlass.storage.integrity.checksum import GRANULE_NBYTES
from windlass.storage.integrity.errors import StepNotAllowed, StoreCorrupt
from windlass.storage.ssd.volume import Volume
from windlass.storage.store import format as layout

KEY = ChunkKey(BlockIndex(0), ChunkIndex(1))
PAGE = 4096
NO_CHUNK = make_geometry(ssd=SsdIndex(1), ssd_weights=(9, 1), chunks_per_block=(1,))


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    volume = open_volume(tmp_path)
    yield volume
    volume.close()


def page() -> memoryview:
    return page_aligned(bytes(PAGE))


def extents(store: DirectStore, step: int, kind: StateKind = StateKind.MASTER) -> list[int]:
    """The extents of a step's chunks. A gradient is as long as a master."""
    nbytes = store.geometry.region_nbytes(StateKind.MASTER)
    regions = [store.regions_to_read(key, Step(step), [(kind, nbytes)]) for key in keys(store.geometry)]
    return [region.extent for (region,) in regions]


def write(store: DirectStore, key: ChunkKey, kind: StateKind, step: int) -> None:
    store.write(key, kind, Step(step), page_aligned(content(store.geometry, key, kind, step, store.attempt)))


def write_gradient(store: DirectStore, key: ChunkKey, step: int, nbytes: int | None = None) -> None:
    store.write(key, StateKind.GRAD, Step(step), page_aligned(gradient(store.geometry, key, step, nbytes)))


class TestSteps:
    def test_next_step_leaves_the_committed_one_untouched(self, volume: Volume) -> None:
        store = new_store(volume)
        commit(store, 0)
        for step in range(1, 5):
            fill(store, step)
            check(store, step)
            check(store, step - 1)
            store.commit(Step(step), Attempt(1), "{}")
            check(store, step)

    def test_nothing_up_to_the_commit_may_be_written(self, volume: Volume) -> None:
        store = new_store(volume)
        commit(store, 2)
        for step in (0, 1, 2):
            for kind in (StateKind.PARAM, StateKind.GRAD):
                with pytest.raises(
                    StepNotAllowed, match=f"cannot write step {step} when step 2 is the last commit; only later steps"
                ):
                    store.write(KEY, kind, Step(step), page())
            with pytest.raises(StepNotAllowed, match=f"cannot commit step {step} when step 2 is the last commit"):
                store.commit(Step(step), Attempt(1), "{}")
        check(store, 2)

    def test_nothing_before_it_is_said_where_to_resume(self, volume: Volume) -> None:
        commit(new_store(volume), 0)
        store = DirectStore.open(volume, JOB, Attempt(2))
        assert store.last_commit() is None
        for kind in (StateKind.PARAM, StateKind.GRAD):
            with pytest.raises(StepNotAllowed, match="cannot write step 1 before resume_from is called"):
                store.write(KEY, kind, Step(1), page())
        for states_step in (None, Step(0)):
            with pytest.raises(StepNotAllowed, match="cannot commit step 1 before"):
                store.commit(Step(1), Attempt(2), "{}", states_step=states_step)
        with pytest.raises(StepNotAllowed, match="cannot read"):
            store.read(KEY, StateKind.PARAM, Step(0), page())

    @pytest.mark.parametrize(("key", "kind"), list(states(make_geometry())))
    def test_every_state_of_every_chunk_must_be_written(self, volume: Volume, key: ChunkKey, kind: StateKind) -> None:
        store = new_store(volume)
        for each in states(store.geometry):
            if each != (key, kind):
                store.write(*each, Step(0), page())
        chunk = store.geometry.local_index(key)
        with pytest.raises(
            StepNotAllowed, match=f"step 0 cannot be committed: the {kind} of chunk {chunk} of this SSD"
        ):
            store.commit(Step(0), Attempt(1), "{}")
        with pytest.raises(
            StepNotAllowed, match=f"{kind} of block {key.block}, chunk {key.chunk} .* 0 bytes of it are held"
        ):
            store.read(key, kind, Step(0), page())
        store.write(key, kind, Step(0), page())
        store.commit(Step(0), Attempt(1), "{}")

    def test_state_that_is_written_in_part_is_neither_read_nor_committed(self, volume: Volume) -> None:
        geometry = make_geometry(chunk_numel=GRANULE_NBYTES // 2, chunks_per_block=(1,), formats=FP32)
        store, key = new_store(volume, geometry), ChunkKey(BlockIndex(0), ChunkIndex(0))
        fill(store, 0)
        (region,) = store.regions_to_write(key, Step(0), [(StateKind.MASTER, 2 * GRANULE_NBYTES)])
        first = page_aligned(b"n" * GRANULE_NBYTES)
        volume.device.write(region.offset, first)
        region.note_written(0, first)
        store.read(key, StateKind.MASTER, Step(0), first)
        with pytest.raises(
            StepNotAllowed, match=r"extent \d \(master of block 0, chunk 0, step 0\): .* not been written yet"
        ):
            store.read(key, StateKind.MASTER, Step(0), page_aligned(bytes(2 * GRANULE_NBYTES)))
        with pytest.raises(StepNotAllowed, match="the master of chunk 0"):
            store.commit(Step(0), Attempt(1), "{}")

    def test_states_of_older_steps_are_not_read(self, volume: Volume) -> None:
        store = new_store(volume)
        for step in (0, 1):
            commit(store, step)
        for step in (0, 2, 3):
            with pytest.raises(StepNotAllowed, match=f"as step {step} left it: 0 bytes .* step 1 is the last commit"):
                store.read(KEY, StateKind.PARAM, Step(step), page())


class TestInPlace:
    """Between commits."""

    @pytest.mark.parametrize("first", [0, 3])
    def test_later_steps_take_no_space_and_leave_the_commit_untouched(self, volume: Volume, first: int) -> None:
        store = new_store(volume)
        fill(store, first)  # in place before the first commit, too
        before = extents(store, first)
        for step in range(first, first + 3):
            fill(store, step)
            check(store, step)
            assert extents(store, step) == before
        last = commit(store, first + 2, states_step=first + 2).step
        for step in range(last + 1, last + 4):
            fill(store, step)
            check(store, step)
            check(store, last)
            assert not set(extents(store, step)) & set(before)
        check(resume(volume, attempt=2), last)

    def test_the_commit_is_not_written_over(self, volume: Volume) -> None:
        store = new_store(volume, LARGE)
        for step in range(16):
            fill(store, step)
            if step % 3 == 0:
                commit(store, step, states_step=step)
            check(store, step - step % 3)
            check(store, step)

    def test_step_that_was_written_over_is_gone_in_whole(self, volume: Volume) -> None:
        """One overwritten state of one chunk is enough, although the other chunks still have theirs."""
        store = new_store(volume)
        commit(store, 0)
        fill(store, 1)
        write(store, KEY, StateKind.MASTER, 2)
        for key, kind in states(store.geometry):
            nbytes = store.geometry.region_nbytes(kind)
            assert bool(_refusal(store, key, kind, 1, nbytes)) == (key == KEY)
            assert bool(_refusal(store, key, kind, 2, nbytes)) == ((key, kind) != (KEY, StateKind.MASTER))
        check(store, 0)

    def test_older_step_does_not_write_over_a_later_one(self, volume: Volume) -> None:
        store = new_store(volume)
        commit(store, 0)
        fill(store, 3)
        for step in (1, 2):
            with pytest.raises(
                StepNotAllowed,
                match=f"cannot write the states of block 0, chunk 1, step {step}: uncommitted data of step 3 is stored",
            ):
                write(store, KEY, StateKind.MASTER, step)
        check(store, 3)
        commit(store, 3, states_step=3)

    def test_refused_request_changes_nothing(self, volume: Volume) -> None:
        store = new_store(volume)
        commit(store, 0)
        fill(store, 1)
        with pytest.raises(ValueError, match="100 bytes cannot be the master"):
            store.regions_to_write(KEY, Step(2), [(StateKind.PARAM, PAGE), (StateKind.MASTER, 100)])
        check(store, 1)
        commit(store, 1, states_step=1)

    @pytest.mark.parametrize("kind", make_geometry().kinds)
    def test_commit_of_a_step_that_was_written_in_part(self, volume: Volume, kind: StateKind) -> None:
        """Once with the later step's states missing, once with all of them written."""
        store = new_store(volume)
        commit(store, 0)
        fill(store, 1)
        for each in store.geometry.kinds:
            if each is not kind:
                write(store, KEY, each, 2)
        with pytest.raises(StepNotAllowed, match="step 1 cannot be committed: step 2 has been begun"):
            store.commit(Step(1), Attempt(1), "{}")
        for states_step, reason in ((1, "chunk 1 of this SSD has the states of step 2, not 1"), (2, "step 1, not 2")):
            with pytest.raises(StepNotAllowed, match=f"step 2 cannot be committed: .*{reason}"):
                store.commit(Step(2), Attempt(1), "{}", states_step=Step(states_step))
        for key in keys(store.geometry):
            if key != KEY:
                for each in store.geometry.kinds:
                    write(store, key, each, 2)
        with pytest.raises(StepNotAllowed, match=f"step 2 cannot be committed: the {kind} of chunk 1 of this SSD"):
            store.commit(Step(2), Attempt(1), "{}")
        check(store, 0)
        write(store, KEY, kind, 2)
        store.commit(Step(2), Attempt(1), "{}")
        check(resume(volume, attempt=2), 2)

    def test_space_of_a_step_that_was_never_committed_serves_the_next_attempt(self, volume: Volume) -> None:
        store = new_store(volume, LARGE)
        commit(store, 0)
        fill(store, 2)
        store = resume(volume, attempt=2)
        for step in (1, 2):
            fill(store, step)
            check(store, 0)
            check(store, step, attempt=2)


def _refusal(store: DirectStore, key: ChunkKey, kind: StateKind, step: int, nbytes: int) -> str | None:
    try:
        store.read(key, kind, Step(step), page_aligned(bytes(nbytes)))
    except StepNotAllowed as error:
        return str(error)
    return None


class TestSkippedSteps:
    @pytest.mark.parametrize(("num_written", "num_skipped"), [(0, 1), (0, 3), (1, 1), (2, 2)])
    def test_commit_has_the_states_of_the_last_step_that_was_not_skipped(
        self, volume: Volume, num_written: int, num_skipped: int
    ) -> None:
        store = new_store(volume)
        commit(store, 0)
        committed = written = 0
        for _ in range(4):
            for step in range(committed + 1, committed + num_written + 1):
                fill(store, step)
            states_step = committed + num_written
            written = states_step if num_written else written
            committed = states_step + num_skipped
            assert commit(store, committed, states_step).step == committed
            check(store, committed, written_as=written)
            with pytest.raises(StepNotAllowed, match="cannot read"):
                check(store, states_step)  # from now on they are the committed step's
            fill(store, committed + 1)  # does not overwrite them
            check(store, committed, written_as=written)
            commit(store, committed + 1, states_step=committed + 1)
            committed = written = committed + 1

    def test_many_in_a_row(self, volume: Volume) -> None:
        store = new_store(volume)
        commit(store, 0)
        last = layout.NUM_COMMIT_RECORDS + 4
        for step in range(1, last + 1):
            commit(store, step, states_step=step - 1)
        check(store, last, written_as=0)
        commit(store, last + 1)
        check(resume(volume, attempt=2), last + 1)

    def test_unchanged_states_are_not_moved(self, volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
        store = new_store(volume)
        commit(store, 0)
        before = extents(store, 0)

        def refuse(offset: int, buffer: memoryview) -> int:
            pytest.fail("a skipped step moves no states")

        monkeypatch.setattr(volume.device, "write", refuse)
        commit(store, 5, states_step=0)
        check(store, 5, written_as=0)
        assert extents(store, 5) == before

    def test_another_attempt_finds_it_once_it_is_committed(self, volume: Volume) -> None:
        store = new_store(volume)
        commit(store, 0)
        store.commit(Step(1), Attempt(1), '{"skipped": 1}', states_step=Step(0))
        store = resume(volume, attempt=2)
        record = store.last_commit()
        assert record is not None
        assert (record.step, record.attempt, record.trainer_state) == (1, 2, '{"skipped": 1}')
        check(store, 1, written_as=0)
        with pytest.raises(StepNotAllowed, match="cannot read"):
            store.read(KEY, StateKind.PARAM, Step(2), page())
        commit(store, 3, states_step=1)
        store = resume(volume, attempt=3)
        check(store, 3, written_as=0)
        commit(store, 4)
        check(store, 4, attempt=3)

    def test_ssd_without_a_chunk(self, volume: Volume) -> None:
        store = new_store(volume, NO_CHUNK)
        commit(store, 0)
        commit(store, 2, states_step=0)
        commit(store, 5, states_step=4)
        record = resume(volume, attempt=2).last_commit()
        assert record is not None
        assert record.step == 5

    def test_refused_before_anything_is_committed(self, volume: Volume) -> None:
        store = new_store(volume)
        for step in (0, 1):
            with pytest.raises(StepNotAllowed, match="the param of chunk 0 of this SSD has not been written"):
                store.commit(Step(step), Attempt(1), "{}", states_step=Step(0))
        commit(store, 0)
        check(store, 0)

    @pytest.mark.parametrize("states_step", [0, 2, 4, 5])
    def test_refused_but_with_the_states_that_are_there(self, volume: Volume, states_step: int) -> None:
        store = new_store(volume)
        commit(store, 3)
        with pytest.raises(StepNotAllowed, match="step 4 cannot be committed: the param of chunk 0"):
            store.commit(Step(4), Attempt(1), "{}", states_step=Step(states_step))
        check(store, 3)
        commit(store, 4, states_step=3)

    def test_refused_when_something_has_been_written_since(self, volume: Volume) -> None:
        store = new_store(volume)
        commit(store, 0)
        write(store, KEY, StateKind.PARAM, 1)
        with pytest.raises(
            StepNotAllowed, match="step 1 cannot be committed: chunk 1 of this SSD has the states of step 1, not 0"
        ):
            store.commit(Step(1), Attempt(1), "{}", states_step=Step(0))
        check(store, 0)
        commit(store, 1)
        check(store, 1)

    def test_commit_that_fails_leaves_the_last_one_protected(self, volume: Volume) -> None:
        """Later writes must not go to extents that the failed commit was to take over."""
        store = new_store(volume)
        commit(store, 0)
        with pytest.raises(ValueError, match="the trainer's state takes 3073 bytes"):
            store.commit(Step(1), Attempt(1), "x" * 3073, states_step=Step(0))
        fill(store, 1)
        check(store, 0)
        check(resume(volume, attempt=2), 0)


class TestGradients:
    def test_lies_where_the_states_of_its_step_will(self, volume: Volume) -> None:
        store = new_store(volume)
        commit(store, 0)
        for step in range(1, 4):
            for key in keys(store.geometry):
                write_gradient(store, key, step)
                check_gradient(store, key, step)
            before = extents(store, step, StateKind.GRAD)
            check(store, step - 1)
            fill(store, step)
            assert extents(store, step) == before
            commit(store, step, states_step=step)
            check(store, step)
        check(resume(volume, attempt=2), 3)

    @pytest.mark.parametrize("nbytes", [PAGE, 2 * 2048, LARGE.extent_nbytes])
    def test_of_any_size_up_to_the_extents(self, volume: Volume, nbytes: int) -> None:
        store = new_store(volume, LARGE)
        for key in keys(LARGE):
            write_gradient(store, key, 0, nbytes)
        for key in keys(LARGE):
            check_gradient(store, key, 0, nbytes)
            (region,) = store.regions_to_read(key, Step(0), [(StateKind.GRAD, nbytes)])
            assert region.offset == volume.allocation(JOB).extent_offsets(LARGE.demand)[region.extent]

    @pytest.mark.parametrize("nbytes", [0, 100, LARGE.extent_nbytes + PAGE])
    def test_wrong_length_is_refused(self, volume: Volume, nbytes: int) -> None:
        store = new_store(volume, LARGE)
        with pytest.raises(ValueError, match=f"^{nbytes} bytes cannot be the grad .* up to {LARGE.extent_nbytes}"):
            store.regions_to_write(KEY, Step(0), [(StateKind.GRAD, nbytes)])

    def test_of_several_granules(self, volume: Volume) -> None:
        """Its checksums cross those of the states that will be stored there."""
        geometry = make_geometry(chunk_numel=GRANULE_NBYTES // 2 + 2048, chunks_per_block=(2,))
        store = new_store(volume, geometry)
        nbytes = geometry.extent_nbytes
        for key in keys(geometry):
            write_gradient(store, key, 0, nbytes)
        for key in keys(geometry):
            check_gradient(store, key, 0, nbytes)
            store.read(key, StateKind.GRAD, Step(0), page_aligned(bytes(GRANULE_NBYTES)))
            with pytest.raises(ValueError, match=f"4096 of {nbytes} bytes end inside a checksum"):
                store.read(key, StateKind.GRAD, Step(0), page())
        commit(store, 0)
        check(store, 0)

    def test_comes_alone(self, volume: Volume) -> None:
        store = new_store(volume)
        write_gradient(store, KEY, 0)
        sizes = [(StateKind.PARAM, PAGE), (StateKind.GRAD, PAGE)]
        with pytest.raises(ValueError, match="a gradient lies where the states do, so both cannot be written at once"):
            store.regions_to_write(KEY, Step(0), sizes)
        with pytest.raises(StepNotAllowed, match="0 bytes of it are held"):
            store.regions_to_read(KEY, Step(0), sizes)
        check_gradient(store, KEY, 0)

    def test_flipped_bit_is_found(self, volume: Volume) -> None:
        store = new_store(volume)
        write_gradient(store, KEY, 0)
        (region,) = store.regions_to_read(KEY, Step(0), [(StateKind.GRAD, 8192)])
        byte = volume.device.read_records(region.offset + 5000, 1)[0]
        volume.device.write_records(region.offset + 5000, bytes([byte ^ 2]))
        with pytest.raises(StoreCorrupt, match=r"extent \d \(grad of block 0, chunk 1, step 0\): the bytes at offset"):
            check_gradient(store, KEY, 0)

    def test_is_gone_when_a_state_is_written(self, volume: Volume) -> None:
        store = new_store(volume)
        commit(store, 0)
        write_gradient(store, KEY, 1)
        (region,) = store.regions_to_read(KEY, Step(1), [(StateKind.GRAD, 8192)])
        write(store, KEY, StateKind.EXP_AVG_SQ, 1)
        with pytest.raises(StepNotAllowed, match="cannot read 8192 bytes of the grad of block 0, chunk 1 as step 1"):
            check_gradient(store, KEY, 1)
        with pytest.raises(StepNotAllowed, match="have not been written yet"):
            region.verify(0, page_aligned(bytes(8192)))  # read when the states were written

    def test_is_not_written_over_states_that_are_not_committed(self, volume: Volume) -> None:
        store = new_store(volume)
        commit(store, 0)
        write(store, KEY, StateKind.PARAM, 1)
        for step in (1, 2):
            with pytest.raises(
                StepNotAllowed,
                match=f"cannot write the gradient of block 0, chunk 1, step {step}: uncommitted data of step 1 is",
            ):
                write_gradient(store, KEY, step)
        commit(store, 1)
        write_gradient(store, KEY, 2)
        check_gradient(store, KEY, 2)
        check(store, 1)

    def test_is_replaced_by_a_later_one_and_not_by_an_earlier_one(self, volume: Volume) -> None:
        store = new_store(volume)
        for step in (1, 1, 2):
            write_gradient(store, KEY, step)
            check_gradient(store, KEY, step)
        for kind in (StateKind.GRAD, StateKind.PARAM):
            with pytest.raises(StepNotAllowed, match="step 1: uncommitted data of step 2 is stored there"):
                store.write(KEY, kind, Step(1), page())
        with pytest.raises(StepNotAllowed, match="0 bytes of it are held"):
            check_gradient(store, KEY, 1)
        check_gradient(store, KEY, 2)

    def test_counts_for_no_state(self, volume: Volume) -> None:
        store = new_store(volume)
        for key in keys(store.geometry):
            write_gradient(store, key, 0)
        with pytest.raises(StepNotAllowed, match="0 bytes of it are held"):
            store.read(KEY, StateKind.PARAM, Step(0), page())
        with pytest.raises(StepNotAllowed, match="the param of chunk 0 of this SSD has not been written"):
            store.commit(Step(0), Attempt(1), "{}")

    def test_of_a_skipped_step_is_forgotten_with_its_commit(self, volume: Volume) -> None:
        store = new_store(volume, LARGE)
        commit(store, 0)
        for step in range(1, 5):
            for key in keys(LARGE):
                write_gradient(store, key, step)
            commit(store, step, states_step=step - 1)
            check(store, step, written_as=0)
            with pytest.raises(StepNotAllowed, match="0 bytes of it are held"):
                check_gradient(store, KEY, step)
        write_gradient(store, KEY, 5)
        commit(store, 5)
        check(resume(volume, attempt=2), 5)

    def test_of_a_later_step_holds_up_the_commit(self, volume: Volume) -> None:
        """Its space would be free while a read or write may be in flight."""
        store = new_store(volume)
        commit(store, 0)
        write_gradient(store, KEY, 2)
        with pytest.raises(StepNotAllowed, match="step 1 cannot be committed: step 2 has been begun"):
            store.commit(Step(1), Attempt(1), "{}", states_step=Step(0))
        check_gradient(store, KEY, 2)
        commit(store, 2, states_step=0)

    def test_leaves_the_manifest_as_it_is(self, tmp_path: Path) -> None:
        """Byte for byte: a later reader of the store sees no difference."""
        images = []
        for name in ("with", "without"):
            (tmp_path / name).mkdir()
            volume = open_volume(tmp_path / name)
            store = new_store(volume)
            commit(store, 0)
            if name == "with":
                for key in keys(store.geometry):
                    write_gradient(store, key, 1)
            record = commit(store, 1)
            at = volume.allocation(JOB).head_offset + store.geometry.manifest_offset(record.manifest)
            images.append(volume.device.read_records(at, store.geometry.manifest_nbytes)[4096:])
            volume.close()
        assert images[0] == images[1]
