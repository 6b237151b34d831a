"""A job's scratch on an SSD for the length of an attempt: its owner, also after a crash, and its content."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.storage.direct_store import DirectStore
from tests.support.storage.faulty_device import Disk, Power, PowerLoss, factory, write_image
from tests.support.storage.job_process import check_disjoint
from tests.support.storage.stores import (
    JOB,
    OTHER,
    check,
    commit,
    flip,
    make_geometry,
    new_store,
    open_volume,
    page_aligned,
    resume,
    used_nbytes,
    volume_file,
)
from windlass.storage.ids import Attempt
from windlass.storage.integrity.checksum import GRANULE_NBYTES
from windlass.storage.integrity.errors import StaleAttempt, StepNotAllowed, StoreCorrupt, StoreMissing
from windlass.storage.memory.capacity import InsufficientSpaceError
from windlass.storage.ssd import volume as volume_module
from windlass.storage.ssd.volume import Volume
from windlass.storage.ssd.volume_format import UNIT_NBYTES
from windlass.storage.store.scratch import Scratch

PAGE = 4096
SLOT_NBYTES = UNIT_NBYTES // 2
NUM_PARTS = 6  # of all operations of a job; one part is fast enough


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    volume = open_volume(tmp_path)
    yield volume
    volume.close()


def some_bytes(seed: object, nbytes: int) -> memoryview:
    return page_aligned(random.Random(f"{seed}").randbytes(nbytes))


def write(volume: Volume, scratch: Scratch, slots: list[int], content: memoryview) -> None:
    at = 0
    for region in scratch.regions_to_write(slots, content.nbytes):
        for start in range(0, region.nbytes, GRANULE_NBYTES):
            part = content[at : at + min(GRANULE_NBYTES, region.nbytes - start)]
            region.note_written(start, part)
            assert volume.device.write(region.offset + start, part) == part.nbytes
            at += part.nbytes


def read(volume: Volume, scratch: Scratch, slots: list[int], nbytes: int) -> memoryview:
    found, at = page_aligned(bytes(nbytes)), 0
    for region in scratch.regions_to_read(slots, nbytes):
        for start in range(0, region.nbytes, GRANULE_NBYTES):
            part = found[at : at + min(GRANULE_NBYTES, region.nbytes - start)]
            assert volume.device.read(region.offset + start, part) == part.nbytes
            region.verify(start, part)
            at += part.nbytes
    return found


def fill(volume: Volume, scratch: Scratch, num_slots: int, seed: object) -> None:
    """Fills every slot with different bytes, then reads and checks all."""
    contents = {slot: some_bytes((seed, slot), SLOT_NBYTES) for slot in range(num_slots)}
    for slot, content in contents.items():
        write(volume, scratch, [slot], content)
    for slot, content in contents.items():
        assert read(volume, scratch, [slot], SLOT_NBYTES) == content


def num_units(volume: Volume) -> int:
    return sum(part.count for part in volume.allocation(JOB).scratch)


class TestSlots:
    @pytest.mark.parametrize("slot_nbytes", [PAGE, SLOT_NBYTES, 2 * GRANULE_NBYTES + PAGE])
    def test_bytes_come_back_from_any_slots(self, tmp_path: Path, direct: bool, slot_nbytes: int) -> None:
        volume = open_volume(tmp_path, direct=direct)
        store = new_store(volume)
        commit(store, 0)
        scratch = store.reserve_scratch(slot_nbytes, 7)
        places = {(3,): slot_nbytes, (6, 0, 1): 2 * slot_nbytes + PAGE, (4, 5): 2 * slot_nbytes}
        for slots, nbytes in places.items():
            write(volume, scratch, list(slots), some_bytes(slots, nbytes))
        for slots, nbytes in places.items():
            assert read(volume, scratch, list(slots), nbytes) == some_bytes(slots, nbytes)
        write(volume, scratch, [0], some_bytes("again", PAGE))
        assert read(volume, scratch, [0], PAGE) == some_bytes("again", PAGE)
        assert read(volume, scratch, [4, 5], 2 * slot_nbytes) == some_bytes((4, 5), 2 * slot_nbytes)
        check(store, 0)
        volume.close()

    @pytest.mark.parametrize(
        ("slots", "nbytes", "text"),
        [
            ([0], SLOT_NBYTES + PAGE, "do not fill 1 slots of 524288 bytes"),
            ([0, 1], SLOT_NBYTES, "do not fill 2 slots"),
            ([0], 100, "no multiple of 4096"),
            ([2], PAGE, r"slots \[2\] are not all of the 2 of its scratch"),
            ([-1], PAGE, "are not all of the 2"),
        ],
    )
    def test_invalid_slot_is_refused(self, volume: Volume, slots: list[int], nbytes: int, text: str) -> None:
        scratch = new_store(volume).reserve_scratch(SLOT_NBYTES, 2)
        for locate in (scratch.regions_to_write, scratch.regions_to_read):
            with pytest.raises(ValueError, match=text):
                locate(slots, nbytes)
        with pytest.raises(ValueError, match="multiple of 4096 bytes, not 5000"):
            new_store(volume, make_geometry(OTHER)).reserve_scratch(5000, 1)

    def test_only_what_was_written_there_is_read(self, volume: Volume) -> None:
        scratch = new_store(volume).reserve_scratch(SLOT_NBYTES, 2)
        with pytest.raises(StepNotAllowed, match=r"scratch slot 1 .*: cannot read 4096 bytes: 0 were written there"):
            scratch.regions_to_read([1], PAGE)
        write(volume, scratch, [1], some_bytes(1, 2 * PAGE))
        with pytest.raises(StepNotAllowed, match="cannot read 4096 bytes: 8192 were written there"):
            scratch.regions_to_read([1], PAGE)
        scratch.regions_to_write([1], 2 * PAGE)
        with pytest.raises(StepNotAllowed, match="have not been written yet"):  # in flight
            read(volume, scratch, [1], 2 * PAGE)

    @pytest.mark.parametrize("at", [0, SLOT_NBYTES - 1])
    def test_a_flipped_bit_is_an_error_that_names_the_place(self, volume: Volume, at: int) -> None:
        scratch = new_store(volume).reserve_scratch(SLOT_NBYTES, 3)
        write(volume, scratch, [0, 2], some_bytes(0, 2 * SLOT_NBYTES))
        (_, region) = scratch.regions_to_read([0, 2], 2 * SLOT_NBYTES)
        flip(volume_file(volume.path), region.offset + at)
        with pytest.raises(StoreCorrupt) as caught:
            read(volume, scratch, [0, 2], 2 * SLOT_NBYTES)
        text = f"SSD {volume.path}, job {JOB}, scratch slot 2 (swapped activations): the bytes at offset "
        assert re.match(re.escape(text + str(region.offset)), str(caught.value))


class TestAttempts:
    @pytest.mark.parametrize(("first", "then"), [(4, 4), (4, 9), (9, 4), (4, 0), (0, 4), (3, 4)])
    def test_another_number_of_slots_in_the_next_attempt(self, volume: Volume, first: int, then: int) -> None:
        other = new_store(volume, make_geometry(OTHER))
        store = new_store(volume)
        commit(store, 0)
        fill(volume, store.reserve_scratch(SLOT_NBYTES, first), first, seed=1)
        commit(other, 0)
        before = volume.allocation(JOB).scratch
        store = resume(volume, attempt=2)
        scratch = store.reserve_scratch(SLOT_NBYTES, then)
        assert num_units(volume) == -(-then // 2)
        assert (volume.allocation(JOB).scratch == before) == (-(-first // 2) == -(-then // 2))
        for slot in range(then):
            # the other attempt's data belongs to no attempt
            with pytest.raises(StepNotAllowed, match="0 were written there"):
                scratch.regions_to_read([slot], PAGE)
        fill(volume, scratch, then, seed=2)
        check_disjoint(volume)
        check(store, 0)
        check(other, 0)

    def test_an_older_one_writes_no_more(self, volume: Volume) -> None:
        older = new_store(volume)
        scratch = older.reserve_scratch(SLOT_NBYTES, 2)
        newer = resume(volume, attempt=2)
        with pytest.raises(StaleAttempt, match="attempt 2 has taken over"):
            scratch.regions_to_write([0], PAGE)
        with pytest.raises(StaleAttempt, match="attempt 2 has taken over"):
            older.reserve_scratch(SLOT_NBYTES, 5)
        fill(volume, newer.reserve_scratch(SLOT_NBYTES, 2), 2, seed=2)
        DirectStore.delete(volume, JOB)
        new_store(volume)
        with pytest.raises(StoreMissing, match="was freed and reserved again"):
            volume.reserve_scratch(JOB, make_geometry().demand, nonce="00" * 8)

    def test_goes_with_the_job(self, volume: Volume, tmp_path: Path) -> None:
        before = volume_file(tmp_path).stat().st_size
        scratch = new_store(volume).reserve_scratch(SLOT_NBYTES, 20)
        assert volume_file(tmp_path).stat().st_size >= before + 20 * SLOT_NBYTES
        assert used_nbytes(volume_file(tmp_path)) >= before + 20 * SLOT_NBYTES  # backed by the disk
        DirectStore.delete(volume, JOB)
        assert volume_file(tmp_path).stat().st_size == before
        with pytest.raises(StaleAttempt):
            scratch.regions_to_write([0], PAGE)

    def test_scratch_that_does_not_fit_is_refused_and_none_is_left(
        self, volume: Volume, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = new_store(volume)
        commit(store, 0)
        fill(volume, store.reserve_scratch(SLOT_NBYTES, 2), 2, seed=1)
        with monkeypatch.context() as patch:
            patch.setattr(volume_module, "directory_free_nbytes", lambda path: 2 * UNIT_NBYTES)
            with pytest.raises(
                InsufficientSpaceError, match=r"for the swapped activations of job ftjob-1: 3.00 MiB needed"
            ):
                store.reserve_scratch(SLOT_NBYTES, 5)
            assert volume.allocation(JOB).scratch == ()
            fill(volume, store.reserve_scratch(SLOT_NBYTES, 4), 4, seed=2)
        check(store, 0)


_SMALL = make_geometry(chunks_per_block=(1,))


class _Life:
    """Attempts of a job with changing scratch; power may be lost at any time."""

    def __init__(self) -> None:
        self.is_committed = False
        self.is_being_deleted = False

    def live(self, volume: Volume) -> None:
        store = new_store(volume, _SMALL)
        store.reserve_scratch(SLOT_NBYTES, 1)
        commit(store, 0)
        self.is_committed = True
        for attempt, num_slots in ((2, 4), (3, 2), (4, 0), (5, 3)):
            store = resume(volume, attempt)
            fill(volume, store.reserve_scratch(SLOT_NBYTES, num_slots), num_slots, seed=attempt)
        self.is_being_deleted = True
        DirectStore.delete(volume, JOB)

    def check(self, volume: Volume) -> None:
        """Checks that states and scratch are complete or missing for the next attempt, and that it can continue."""
        check_disjoint(volume)
        try:
            store = resume(volume, attempt=9)
        except StoreMissing:
            assert not self.is_committed or self.is_being_deleted
            store = new_store(volume, replace(_SMALL, attempt=Attempt(9)))
        else:
            assert store.last_commit() is not None or not self.is_committed
            if store.last_commit() is not None:
                check(store, 0)
        fill(volume, store.reserve_scratch(SLOT_NBYTES, 3), 3, seed=9)
        check_disjoint(volume)
        DirectStore.delete(volume, JOB)


@pytest.mark.long
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, NUM_PARTS))])
def test_power_loss_before_every_operation(tmp_path: Path, part: int) -> None:
    """Every unit has one owner or is free, and none is lost; the neighbour keeps its states."""
    volume = open_volume(tmp_path)
    commit(new_store(volume, make_geometry(OTHER)), 0)
    volume.close()
    image, size = volume_file(tmp_path).read_bytes(), used_nbytes(volume_file(tmp_path))
    for off_at in range(part, 400, NUM_PARTS):
        write_image(volume_file(tmp_path), image)
        life, disk, is_over = _Life(), Disk(Power(off_at=off_at), bytearray(image)), True
        try:
            volume = Volume.open(tmp_path, direct=False, make_device=factory(disk))
            try:
                life.live(volume)
            finally:
                volume.close()
        except PowerLoss:
            is_over = False
        for outcome in disk.outcomes(off_at, num_random=1):
            write_image(volume_file(tmp_path), outcome)
            volume = open_volume(tmp_path)
            life.check(volume)
            check(resume(volume, attempt=2, job=OTHER), 0)
            assert list(volume.allocations()) == [OTHER]
            assert volume_file(tmp_path).stat().st_size == len(image)
            assert used_nbytes(volume_file(tmp_path)) < size + UNIT_NBYTES  # except for the file system's own metadata
            volume.close()
        if is_over:
            assert off_at > 80
            return
    pytest.fail("the job never came to its end")
