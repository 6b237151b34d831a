"""A job's states move to more, fewer and other boxes: all bytes arrive, and a move that is cut off is made again."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.actors.local_move import move_locally
from tests.support.actors.moving_job import ONE_BOX, MovingJob, epochs_on, hidden
from tests.support.actors.stage_runs import STAGES
from tests.support.cut_off import CutOff
from tests.support.training import keep_calibration
from windlass.actors.runtime.moving.lead import Moved
from windlass.actors.runtime.start_up import decisions_path, recovery_of
from windlass.actors.worker_policy.stages import Stage
from windlass.storage.ids import Attempt, BlockIndex, LayoutEpoch, StateKind, Step
from windlass.storage.integrity import StoreCorrupt, StoreError
from windlass.storage.memory import InsufficientSpaceError
from windlass.storage.ssd.volume import VOLUME_FILE, Volume
from windlass.storage.store.decisions import Decision, DecisionLog, last_decision

Look = Callable[[int, object], None]


def silent(box: int, message: object) -> None: ...


def move(job: MovingJob, stages: tuple[Stage, ...], on_message: Look = silent) -> Moved:
    specs = job.moves(stages)
    moved = move_locally(specs, job.layout, direct=False, on_message=on_message)
    job.moved(stages)
    assert set().union(*epochs_on(specs)) <= {job.epoch}
    return moved


@pytest.mark.parametrize(
    ("divisions", "tied"),
    [
        (("2-1-2",), True),
        *(pytest.param(("2-3", "2-1-2", "1-3-1", "4-1"), tied, marks=pytest.mark.long) for tied in (False, True)),
    ],
)
def test_all_bytes_arrive_on_two_three_one_and_other_boxes(
    tmp_path: Path, divisions: tuple[str, ...], *, tied: bool
) -> None:
    job = MovingJob.make(tmp_path / "job", tied=tied)
    states = job.commit(7)
    for division in divisions:
        moved = move(job, STAGES[division])
        assert moved.step == 7
        assert job.states(7) == states
    assert move(job, ONE_BOX).step == 7
    assert job.states(7) == states


def test_what_moves_is_told_by_boxes_and_blocks(tmp_path: Path) -> None:
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = job.commit(1)
    moved = move(job, STAGES["1-3-1"])

    def nbytes(*blocks: int) -> int:
        return sum(len(state) for (key, _), state in states.items() if key.block in blocks)

    assert [(each.source, each.target, each.num_blocks, each.nbytes) for each in moved.blocks] == [
        ("north", "east", 1, nbytes(1)),
        ("east", "south", 1, nbytes(4)),
    ]
    assert str(moved.blocks[0]).endswith("of 1 block from north to east")


def test_boxes_may_have_other_ssds_and_keep_their_blocks(tmp_path: Path) -> None:
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    job.commit(1)
    first, second = job.moves(STAGES["2-3"])
    assert second.new is not None
    ssd_dirs = (*second.new.ssd_dirs, f"{second.new.ssd_dirs[0]}-more")
    keep_calibration(Path(ssd_dirs[-1]))
    specs = [first, dataclasses.replace(second, new=dataclasses.replace(second.new, ssd_dirs=ssd_dirs))]
    assert move_locally(specs, job.layout, direct=False).blocks == ()
    assert epochs_on(specs) == [{1}, {1}]


def test_without_a_commit_only_the_old_stores_go(tmp_path: Path) -> None:
    job = MovingJob.make(tmp_path / "job")
    assert move(job, STAGES["2-3"]) == Moved(step=None, blocks=())


def cut_at(number: int) -> Look:
    counter = itertools.count()

    def look(box: int, message: object) -> None:
        if next(counter) == number:
            raise CutOff

    return look


@pytest.mark.parametrize("part", [None, *(pytest.param(part, marks=pytest.mark.long) for part in range(8))])
def test_a_move_that_is_cut_off_at_any_message_is_made_again(tmp_path: Path, part: int | None) -> None:
    """All parts together cut at every message; without a part, at some."""
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = job.commit(3)
    seen: list[object] = []
    move(job, STAGES["2-1-2"], lambda box, message: seen.append(message))
    assert len(seen) > 50
    numbers = list(range(len(seen)))
    if part is not None:
        numbers = numbers[part::8]
    else:
        calls = [number for number in numbers if isinstance(seen[number], str)]
        numbers = random.Random(1).sample(calls, 2) + random.Random(2).sample(numbers, 2)
    for number in numbers:
        # Back and forth, so each is another move.
        division = STAGES["2-3"] if len(job.stages) == 3 else STAGES["2-1-2"]
        with pytest.raises(CutOff):
            move(job, division, cut_at(number))
        assert move(job, division).step in (3, None)
        assert job.states(3) == states


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_move_counts_from_its_record_on_and_without_it_both_divisions_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_durable: bool
) -> None:
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = job.commit(3)
    append = DecisionLog.append

    def cut(self: DecisionLog, decision: Decision) -> None:
        if is_durable:
            append(self, decision)
        raise OSError("the disk of the log has failed")

    with monkeypatch.context() as patch:
        patch.setattr(DecisionLog, "append", cut)
        with pytest.raises(OSError, match="of the log"):
            move(job, STAGES["1-4"])
    assert epochs_on(job.moves(STAGES["1-4"])) == [{0, 1}, {0, 1}]
    assert move(job, STAGES["1-4"]).step == (None if is_durable else 3)
    assert job.states(3) == states


@pytest.mark.long
def test_a_cut_off_move_is_given_up_for_another_one(tmp_path: Path) -> None:
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = job.commit(3)

    def in_last_commit(box: int, message: object) -> None:
        if message == "move is done":
            raise CutOff

    with pytest.raises(CutOff):
        move(job, STAGES["1-4"], in_last_commit)
    move(job, STAGES["2-1-2"])
    assert job.states(3) == states


def test_attempts_of_another_division_are_refused(tmp_path: Path) -> None:
    job = MovingJob.make(tmp_path / "job")
    job.commit(3)
    (before,), (after, _) = job.boxes(), job.boxes(STAGES["2-3"], 1)
    with pytest.raises(StoreError, match="are those of layout epoch 0, and this attempt is of epoch 1"):
        recovery_of(after, ())
    move(job, STAGES["2-3"])
    with pytest.raises(StoreError, match="are those of layout epoch 1, and this attempt is of epoch 0"):
        recovery_of(before, ())


def test_a_box_that_has_lost_its_ssd_is_named_with_its_layers(tmp_path: Path) -> None:
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = job.commit(3)
    named = r"SSD .*ssd0-of-box-1 of box 'east' \(layers 2 to 3 and the head\) has no intact record of it"
    volume = Path(job.boxes()[1].ssd_dirs[0]) / VOLUME_FILE
    with hidden(volume), pytest.raises(StoreCorrupt, match=named):
        move(job, STAGES["2-1-2"])
    move(job, STAGES["2-1-2"])
    assert job.states(3) == states


def test_a_damaged_state_ends_the_move_and_names_its_place(tmp_path: Path) -> None:
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = job.commit(3)
    broken = next(
        state for (key, kind), state in states.items() if key.block == BlockIndex(3) and kind is StateKind.EXP_AVG
    )
    for name in job.boxes()[1].ssd_dirs:
        path = Path(name) / VOLUME_FILE
        if (offset := path.read_bytes().find(broken)) >= 0:
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(bytes([broken[0] ^ 1]))
    with pytest.raises(StoreCorrupt, match=r"ssd[01]-of-box-1.*exp_avg of block 3.*their checksum is wrong"):
        move(job, STAGES["1-3-1"])
    assert epochs_on(job.moves(STAGES["1-3-1"])) == [{0}, {0}, set()]


def test_a_box_without_room_is_refused_and_its_new_stores_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = job.commit(3)
    free_nbytes = Volume.free_nbytes

    def little(self: Volume) -> int:
        return 4096 if "box-2" in str(self.path) else free_nbytes(self)

    with monkeypatch.context() as patch:
        patch.setattr(Volume, "free_nbytes", little)
        with pytest.raises(InsufficientSpaceError, match=r"box-2.*4.00 KiB"):
            move(job, STAGES["2-1-2"])
    assert epochs_on(job.moves(STAGES["2-1-2"])) == [{0}, {0}, set()]
    assert job.states(3) == states


@pytest.mark.long
@pytest.mark.parametrize("keeps_log", [True, False])
def test_new_stores_count_if_an_old_one_is_gone_and_the_log_is_of_before(tmp_path: Path, *, keeps_log: bool) -> None:
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = job.commit(3)
    log = decisions_path(job.boxes()[0])
    before = log.read_bytes() if keeps_log else b""

    def look(box: int, message: object) -> None:
        if (box, message) == (1, "finish is done"):
            raise CutOff

    with pytest.raises(CutOff):
        move(job, STAGES["1-4"], look)
    log.write_bytes(before)
    assert move(job, STAGES["1-4"]).step is None
    assert last_decision(log) is not None
    assert job.states(3) == states


def test_stale_new_stores_do_not_replace_lost_old_ones(tmp_path: Path) -> None:
    """The job has trained on after a move that was given up, and then a box has lost an SSD."""
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    job.commit(3)

    def prepared(box: int, message: object) -> None:
        if message == "move is done":
            raise CutOff

    with pytest.raises(CutOff):
        move(job, STAGES["1-4"], prepared)
    with closing(DecisionLog(decisions_path(job.boxes()[0]))) as log:
        log.append(Decision.make(step=Step(9), attempt=Attempt(1), epoch=LayoutEpoch(0), trainer_state="{}"))
    with hidden(Path(job.boxes()[1].ssd_dirs[0]) / VOLUME_FILE), pytest.raises(StoreCorrupt, match="committed step 9"):
        move(job, STAGES["1-4"])
