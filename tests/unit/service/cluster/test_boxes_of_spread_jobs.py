"""The boxes that a job over several gets, waits for, or loses."""

from typing import Any

import pytest

from tests.support.service.boxes import make_facts
from tests.support.service.cluster_stage import NAME
from tests.support.service.spread_stage import PLAN, Spread
from windlass.actors.scheduler.scheduler import INTERRUPTED, PAUSED
from windlass.service.dispatcher import dispatcher
from windlass.service.preparation.pipeline import PreparationError
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.boxes import (
    HELD_FOR_PART,
    BoxRepository,
    BoxState,
    Instruction,
    MirrorRepository,
)


def test_box_with_a_part_gets_no_other_job(spread: Spread) -> None:
    job_id = spread.run()
    other = spread.prepare(box=NAME)
    spread.head.tick()
    assert spread.head.status(other) is JobStatus.QUEUED
    assert f"is in use by job {job_id}" in (spread.head.job(other).waiting_reason or "")
    spread.head.export_model()
    spread.end_attempt(job_id, "succeeded", trained_tokens=7)
    spread.go_on(lambda: spread.head.job(other).node == spread.box.node)


def test_paused_job_leaves_its_boxes_to_others_and_waits_for_them_when_it_is_resumed(spread: Spread) -> None:
    job_id = spread.run()
    with spread.head.database.write() as session:
        MirrorRepository(session).request(Instruction.PAUSE, job_id, here=spread.head.node)
    spread.head.tick()
    spread.end_attempt(job_id, PAUSED)
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.PAUSED and spread.state(job_id) == "ready")
    other = spread.prepare(box=NAME)
    spread.go_on(lambda: spread.head.status(other) is JobStatus.RUNNING)
    with spread.head.database.write() as session:
        MirrorRepository(session).request(Instruction.RESUME, job_id, here=spread.head.node)
    spread.head.tick(2)
    assert spread.head.status(job_id) is JobStatus.QUEUED
    assert f"on box {NAME} it needs 2 GPUs; 1 is free" in (spread.head.job(job_id).waiting_reason or "")
    with spread.head.database.write() as session:
        MirrorRepository(session).request(Instruction.CANCEL, other, here=spread.head.node)
    spread.go_on(lambda: spread.box.runners.cancelled)
    spread.box.end_runner(other, 1)
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.RUNNING)
    assert spread.head.job(job_id).attempt == 2


def test_job_over_several_boxes_waits_until_all_are_free_and_keeps_its_place(spread: Spread) -> None:
    busy = spread.prepare(box=NAME)
    spread.go_on(lambda: spread.head.status(busy) is JobStatus.RUNNING)
    job_id = spread.prepare(boxes=["head", NAME])
    later = spread.prepare(box="head")
    spread.head.tick()
    assert [spread.head.status(each) for each in (job_id, later)] == [JobStatus.QUEUED] * 2
    assert (spread.head.job(job_id).waiting_reason or "").startswith(f"on box {NAME} it needs 2 GPUs; 1 is free")
    assert spread.head.stage_planners == []


def test_reason_names_the_box_that_is_in_use_and_does_not_compare_boxes(spread: Spread) -> None:
    busy = spread.prepare(box="head")
    spread.go_on(lambda: spread.head.status(busy) is JobStatus.RUNNING)
    job_id = spread.prepare(boxes=["head", NAME])
    spread.head.tick()
    assert spread.head.job(job_id).waiting_reason == f"the CPU of box head is in use by job {busy}"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"link_host": None}, "has not told its address for other boxes"),
        ({"windlass": "0.0.1", "link_host": "127.0.0.1"}, "runs another release of windlass than the head"),
    ],
)
def test_box_that_cannot_have_a_part_is_named(spread: Spread, facts: dict[str, Any], reason: str) -> None:
    with spread.head.database.write() as session:
        BoxRepository(session).set(spread.row.id, facts=make_facts(**facts).model_dump(mode="json"))
    job_id = spread.prepare(boxes=["head", NAME])
    spread.head.tick()
    assert reason in (spread.head.job(job_id).waiting_reason or "")


def test_job_that_asks_for_more_boxes_than_are_open_waits(spread: Spread) -> None:
    job_id = spread.prepare(boxes=3)
    spread.head.tick()
    assert spread.head.job(job_id).waiting_reason == "it asks for 3 boxes, and 2 are open to it"


def test_job_that_no_division_fits_fails(spread: Spread) -> None:
    job_id = spread.prepare(boxes=2)
    spread.head.tick()
    spread.head.stage_planners[-1].answer = PreparationError("does_not_fit", "box attic lacks 3 GiB", None)
    spread.head.tick()
    job = spread.head.job(job_id)
    assert (job.status, job.error) == (
        JobStatus.FAILED,
        {"code": "does_not_fit", "message": "box attic lacks 3 GiB", "param": None},
    )


def test_boxes_that_fit_are_taken_although_others_have_fewer_jobs(spread: Spread) -> None:
    cellar = spread.add_box("cellar")
    spread.prepare(box=NAME)
    spread.go_on(lambda: spread.box.runners.alive)
    job_id = spread.prepare(boxes=2)
    spread.head.tick()
    [free] = spread.head.stage_planners
    assert ([box.name for box in free.request.boxes], free.request.number) == (["head", "cellar"], 2)
    free.answer = PreparationError("does_not_fit", "box cellar lacks 3 GiB", None)
    spread.head.tick()
    _, among_all = spread.head.stage_planners
    assert [box.name for box in among_all.request.boxes] == ["head", "cellar", NAME]
    among_all.answer = PLAN
    spread.head.tick(2)
    assert f"on box {NAME} it needs 2 GPUs; 1 is free" in (spread.head.job(job_id).waiting_reason or "")
    with spread.head.database.write() as session:
        BoxRepository(session).set_state(cellar, BoxState.DRAINING)
    spread.head.tick()
    assert spread.head.status(job_id) is JobStatus.QUEUED, "it does not need the box that does not fit"


def test_job_gets_the_boxes_that_its_plan_has_chosen(spread: Spread) -> None:
    spread.add_box("aaa")
    job_id = spread.prepare(boxes=2)
    spread.head.tick()
    [planner] = spread.head.stage_planners
    assert [box.name for box in planner.request.boxes] == ["head", "aaa", NAME]
    planner.answer = PLAN
    spread.head.tick(2)
    assert spread.state(job_id) == "copying"
    assert len(spread.head.stage_planners) == 1


def test_job_that_fits_no_boxes_fails_with_what_the_closest_lack(spread: Spread) -> None:
    spread.add_box("cellar")
    spread.prepare(box=NAME)
    spread.go_on(lambda: spread.box.runners.alive)
    job_id = spread.prepare(boxes=2)
    spread.head.tick()
    for why in ("box cellar lacks 3 GiB", "box attic lacks 2 GiB"):
        spread.head.stage_planners[-1].answer = PreparationError("does_not_fit", why, None)
        spread.head.tick()
    assert spread.head.job(job_id).error == {"code": "does_not_fit", "message": "box attic lacks 2 GiB", "param": None}


def test_drained_box_ends_the_attempt_at_a_commit(spread: Spread) -> None:
    job_id = spread.run()
    with spread.head.database.write() as session:
        BoxRepository(session).set_state(spread.row.id, BoxState.DRAINING)
    spread.head.tick()
    assert spread.head.runners.paused == [(job_id, 1)]
    spread.end_attempt(job_id, PAUSED)
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.QUEUED)
    ended = "because box attic is draining; the job goes on by itself afterwards"
    assert any(message.endswith(ended) for message in spread.head.messages(job_id)), spread.head.messages(job_id)
    spread.go_on(lambda: "draining" in (spread.head.job(job_id).waiting_reason or ""))
    with spread.head.database.write() as session:
        BoxRepository(session).set_state(spread.row.id, BoxState.READY)
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.RUNNING)


def test_box_that_was_removed_before_the_job_began_is_replaced(spread: Spread) -> None:
    job_id = spread.divide()
    with spread.head.database.write() as session:
        BoxRepository(session).remove(spread.row.id, head=spread.head.node)
    spread.head.tick()
    assert spread.part(job_id) is None
    assert spread.head.status(job_id) is JobStatus.QUEUED


def test_box_that_was_removed_with_states_of_the_job_is_named(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    with spread.head.database.write() as session:
        BoxRepository(session).remove(spread.row.id, head=spread.head.node)
    spread.head.tick()
    spread.head.now += 300
    spread.head.tick()
    assert "was removed" in (spread.head.job(job_id).waiting_reason or "")


def test_attempt_ends_at_once_when_one_of_its_boxes_is_removed(spread: Spread) -> None:
    job_id = spread.run()
    with spread.head.database.write() as session:
        BoxRepository(session).remove(spread.row.id, head=spread.head.node)
    spread.head.tick(2)
    assert not spread.head.runners.alive
    spread.head.now += 300
    spread.head.tick(2)
    told = f"Box {NAME}, which has a part of the job's states, was removed, so the job cannot go on"
    assert any(message.startswith(told) for message in spread.head.messages(job_id))
    assert f"box {NAME} that has a part of its states was removed" in (spread.head.job(job_id).waiting_reason or "")
    with spread.head.database.write() as session:
        MirrorRepository(session).request(Instruction.CANCEL, job_id, here=spread.head.node)


def test_part_does_not_begin_beside_processes_of_another_job(spread: Spread) -> None:
    other = spread.prepare(box=NAME)
    spread.go_on(lambda: spread.head.status(other) is JobStatus.RUNNING)
    job_id = spread.divide_beside(other)
    spread.box.dispatcher._parts.tick()
    assert {job for job, _ in spread.box.runners.alive} == {other}
    assert spread.part(job_id, spread.box).served == 0  # type: ignore[union-attr]


def test_box_whose_facts_cannot_be_read_is_not_called_removed(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    with spread.head.database.write() as session:
        BoxRepository(session).set(spread.row.id, facts={"num_gpus": "many"})
    other = spread.prepare(boxes=["head", NAME])
    spread.head.tick()
    spread.head.now += 300
    spread.head.tick()
    for each in (job_id, other):
        reason = spread.head.job(each).waiting_reason or ""
        assert "facts of itself that this release of windlass cannot read" in reason
        assert "removed" not in reason


def test_jobs_of_lower_priority_pause_on_all_boxes_and_go_on_afterwards(spread: Spread) -> None:
    here, there = (spread.prepare(box=name, priority=1) for name in ("head", NAME))
    spread.go_on(lambda: spread.head.runners.alive and spread.box.runners.alive)
    job_id = spread.prepare(boxes=["head", NAME])
    spread.head.tick()
    spread.head.stage_planners[-1].answer = PLAN
    spread.head.tick()
    assert spread.state(job_id) == "copying"
    assert not spread.box.runners.paused, "others train on while files are copied"
    spread.go_on(lambda: spread.box.runners.paused and not spread.head.runners.alive)
    assert spread.box.runners.paused[0] == (there, 1)
    journal = spread.box.journal(there, 1)
    journal.append_outcome(PAUSED, "The attempt ended after a commit")
    journal.close()
    spread.box.end_runner(there)
    spread.go_on(lambda: len(spread.head.runners.alive) == len(spread.box.runners.alive) == 1)
    assert spread.head.runners.alive == spread.box.runners.alive == {(job_id, 1)}
    assert [spread.head.status(each) for each in (here, there)] == [JobStatus.QUEUED] * 2
    assert any(HELD_FOR_PART in message for message in spread.box.messages(there))
    spread.head.export_model()
    spread.end_attempt(job_id, "succeeded", trained_tokens=7)
    spread.go_on(lambda: (there, 2) in spread.box.runners.alive and (here, 2) in spread.head.runners.alive)


@pytest.mark.long
def test_box_that_is_reserved_begins_no_other_job_and_is_freed_if_the_job_cannot_begin(spread: Spread) -> None:
    job_id = spread.run()
    spread.begin(job_id)
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.QUEUED and spread.state(job_id) == "ready")
    assert not spread.box.runners.alive, "it waits before the next attempt"
    with spread.head.database.write() as session:
        MirrorRepository(session).request(Instruction.CANCEL, job_id, here=spread.head.node)
    spread.go_on(lambda: spread.box.dispatcher._parts.hold is None and spread.part(job_id) is None)


def test_box_begins_no_job_of_lower_priority_between_two_attempts(spread: Spread) -> None:
    job_id = spread.run()
    other = spread.prepare(box=NAME, priority=1)
    spread.begin(job_id)
    spread.end_attempt(job_id, INTERRUPTED)
    held = list[bool]()

    def next_attempt_begins() -> bool:
        held.append(spread.box.dispatcher._parts.hold is not None)
        return len(spread.box.runners.started) > 1

    spread.go_on(next_attempt_begins)
    assert all(held), "in every pass of the box's scheduler"
    assert spread.box.runners.alive == {(job_id, 2)}
    assert spread.head.status(other) is JobStatus.QUEUED


@pytest.mark.long
def test_box_is_not_reserved_while_the_head_has_no_room(spread: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = spread.run()
    spread.begin(job_id)
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.QUEUED and spread.state(job_id) == "ready")
    assert spread.box.dispatcher._parts.hold is not None
    spread.head.now += 60  # the pause between attempts is over
    monkeypatch.setattr(dispatcher, "room_reason", lambda _: "the disk is full")
    spread.go_on(lambda: spread.box.dispatcher._parts.hold is None)
    assert spread.head.job(job_id).waiting_reason == "the disk is full"
