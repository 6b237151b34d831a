"""Jobs whose blocks move to more and fewer boxes between attempts: the losses and params of one box, to the bit."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.local_move import move_locally
from tests.support.actors.moving_job import ONE_BOX, MovingJob, epochs_on
from tests.support.actors.stage_runs import PLACES, STAGES, run, run_attempt
from tests.support.actors.whole_jobs import Run, grouped, job
from tests.support.cut_off import CutOff
from tests.support.training import has_direct_io, leftovers_of
from windlass.actors.messages import Message, UpdateStep
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import ActorName, Precision, StatePrecision
from windlass.storage.store.decisions import Decision, DecisionLog

CHANGES: dict[str, Any] = {"precision": Precision.BF16, "clip_norm": 0.5, "total_steps": 4, "evaluate_every": None}


def train(moving: MovingJob, until: int | None = None) -> None:
    """Trains to the end, or is cut off in a step."""
    moving.attempt += 1

    def look(to: ActorName, message: Message) -> None:
        if until is not None and isinstance(message, UpdateStep) and message.step == until:
            raise CutOff

    boxes = moving.boxes()
    if until is not None:
        with pytest.raises(CutOff):
            run_attempt(*boxes, on_message=look)
        return
    assert run_attempt(*boxes)["status"] == "succeeded"
    assert [leftovers_of(each) for each in boxes] == [[]] * len(boxes)


# Each step is committed, so no attempt reports a step again.
PLACED = {
    "SSDs": {},
    "split, tied": {"state_precision": StatePrecision.SPLIT, "tied": True},
    "host memory": {"placement": Placement(host_blocks=(0, 1, 2, 3, 4), commit_every=1), "precision": Precision.FP32},
    "mixed": {"placement": dataclasses.replace(PLACES["mixed"], commit_every=1), "precision": Precision.FP16},
}


@pytest.mark.long
@pytest.mark.parametrize("changes", [pytest.param(each, id=name) for name, each in PLACED.items()])
def test_a_job_on_one_then_two_three_and_one_boxes_has_the_bits_of_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = CHANGES | changes
    one = run(tmp_path / "one", **changes)
    moving = MovingJob(grouped(job(tmp_path / "moving", lanes=1, **changes), 2))
    for until, division in ((2, STAGES["2-3"]), (3, STAGES["2-1-2"]), (4, ONE_BOX)):
        train(moving, until)
        moved = move_locally(moving.moves(division), moving.layout, direct=has_direct_io(tmp_path))
        moving.moved(division)
        assert moved.step is not None
        assert moved.step < until
        assert sum(each.nbytes for each in moved.blocks) > 0
    train(moving)
    Run.of(moving.spec).assert_equals(one)


@pytest.mark.long
@pytest.mark.parametrize("is_decided", [pytest.param(False, id="given up"), pytest.param(True, id="decided")])
def test_an_attempt_frees_the_stores_that_a_cut_off_move_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_decided: bool
) -> None:
    moving = MovingJob(grouped(job(tmp_path / "moving", lanes=1, **CHANGES), 2), STAGES["2-3"])
    train(moving, 3)
    moves, append = moving.moves(STAGES["4-1"]), DecisionLog.append

    def cut_off(log: DecisionLog, decision: Decision) -> None:
        if is_decided:
            append(log, decision)
        raise CutOff

    with monkeypatch.context() as patch:
        patch.setattr(DecisionLog, "append", cut_off)
        with pytest.raises(CutOff):
            move_locally(moves, moving.layout, direct=has_direct_io(tmp_path))
    assert epochs_on(moves) == [{0, 1}] * 2
    if is_decided:
        moving.moved(STAGES["4-1"])
    train(moving, 4)
    assert epochs_on(moves) == [{int(is_decided)}] * 2
