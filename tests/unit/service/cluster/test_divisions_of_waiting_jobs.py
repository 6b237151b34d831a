"""Jobs over several boxes that wait: those that are planned anew, and the boxes that they keep or leave to others."""

import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from tests.support.service.cluster_stage import NAME
from tests.unit.service.cluster.test_moved_jobs import OTHER, Moving, alive, moving, plan_over, start
from windlass.actors.runtime.moving.division import MOVED
from windlass.actors.scheduler.scheduler import INTERRUPTED
from windlass.service.jobs.stage_plans import keep_stages, next_stages_of, stages_of
from windlass.service.preparation.pipeline import PreparationError
from windlass.storage.sql.errors import StatusConflict
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.boxes import BoxRepository, Instruction, PartRepository, PartState

__all__ = ["moving"]


def divided(moving: Moving) -> str:
    """A job over two of three boxes that has not begun."""
    job_id = moving.prepare(boxes=2)
    moving.head.tick()
    moving.head.stage_planners[-1].answer = plan_over("head", NAME)
    moving.head.tick()
    assert moving.nodes(job_id) == [moving.box.node]
    return job_id


def lose(moving: Moving, name: str = NAME) -> None:
    """A box is away from now on, until its agent calls."""
    with moving.head.database.write() as session:
        box = BoxRepository(session).by_name(name)
        assert box is not None
        BoxRepository(session).set(box.id, seen_at=0.0)


def planned_boxes(moving: Moving) -> list[list[str]]:
    return [[box.name for box in planner.request.boxes] for planner in moving.head.stage_planners]


def reason(moving: Moving, job_id: str) -> str:
    return moving.head.job(job_id).waiting_reason or ""


def reserved(moving: Moving, job_id: str) -> bool:
    part = moving.part(job_id)
    assert part is not None
    return part.link is None and part.attempt > part.served


# --- jobs that have not begun -----------------------------------------------------------------------------------------


def test_job_that_has_not_begun_is_planned_anew_without_a_box_that_is_away(moving: Moving) -> None:
    job_id = divided(moving)
    lose(moving)
    moving.head.tick()
    assert planned_boxes(moving)[-1] == ["head", OTHER]
    assert moving.nodes(job_id) == [moving.box.node], "its division stays until there is another one"
    moving.head.stage_planners[-1].answer = plan_over("head", OTHER)
    moving.head.tick()
    assert moving.nodes(job_id) == [moving.other.node]
    moving.go_on(lambda: alive(moving) == [True, False, True])
    spec = moving.other.runners.started[-1]
    assert (spec.attempt, spec.box, spec.box_names) == (1, 1, ("head", OTHER))
    moving.go_on(lambda: not moving.has_part(moving.box, job_id))
    assert not (moving.box.settings.jobs_dir / job_id).exists()


def test_box_that_is_back_before_there_is_another_plan_stays(moving: Moving) -> None:
    job_id = divided(moving)
    lose(moving)
    moving.head.tick()
    assert len(moving.head.stage_planners) == 2
    moving.agent.tick()
    moving.head.tick()
    assert moving.head.stage_planners[-1].stopped
    moving.go_on(lambda: alive(moving) == [True, True, False])
    assert moving.nodes(job_id) == [moving.box.node]


def test_job_that_fits_no_other_boxes_waits_for_its_own(moving: Moving) -> None:
    job_id = divided(moving)
    lose(moving)
    moving.head.tick()
    moving.head.stage_planners[-1].answer = PreparationError("does_not_fit", "box cellar lacks 3 GiB", None)
    moving.head.tick(3)
    assert moving.head.status(job_id) is JobStatus.QUEUED
    away = f"box {NAME}, which has a part of it, is away"
    told, cannot = reason(moving, job_id).split("; ")
    assert told.startswith(f"{away} since ")
    assert cannot == f"it cannot be planned over other boxes: box {OTHER} lacks 3 GiB"
    assert len(moving.head.stage_planners) == 2, "it is not tried again over the same boxes"
    moving.head.now += 300
    moving.head.tick()
    assert len(moving.head.stage_planners) == 3, "they may have room by now"
    moving.go_on(lambda: alive(moving) == [True, True, False])


def test_job_that_has_not_begun_gets_the_boxes_with_which_it_is_resumed(moving: Moving) -> None:
    job_id = divided(moving)
    moving.request(Instruction.PAUSE, job_id)
    moving.request(Instruction.RESUME, job_id, boxes=["head", OTHER])
    moving.head.tick()
    moving.head.stage_planners[-1].answer = plan_over("head", OTHER)
    moving.go_on(lambda: alive(moving) == [True, False, True])
    assert moving.head.runners.moves == [], "it has no states"
    spec = moving.other.runners.started[-1]
    assert (spec.attempt, spec.layout_epoch) == (1, 0)


def test_job_that_has_not_begun_and_does_not_fit_the_boxes_with_which_it_is_resumed_is_paused(moving: Moving) -> None:
    job_id = divided(moving)
    moving.request(Instruction.PAUSE, job_id)
    moving.request(Instruction.RESUME, job_id, boxes=["head", OTHER])
    moving.head.tick()
    moving.head.stage_planners[-1].answer = PreparationError("does_not_fit", f"box {OTHER} lacks 3 GiB", None)
    moving.head.tick()
    assert moving.head.status(job_id) is JobStatus.PAUSED
    assert f"box {OTHER} lacks 3 GiB. It stays on head, {NAME}" in moving.head.messages(job_id)[-1]
    moving.request(Instruction.RESUME, job_id)
    moving.go_on(lambda: alive(moving) == [True, True, False])


def test_part_on_a_box_that_was_removed_meanwhile_does_not_count(moving: Moving) -> None:
    """The box was removed between the choice of boxes and the write of their parts."""
    job_id = divided(moving)
    with moving.head.database.write() as session:
        BoxRepository(session).remove(moving.row.id, head=moving.head.node)
        PartRepository(session).add(job_id, moving.box.node, position=1, state=PartState.COPYING)
    moving.head.tick()
    assert planned_boxes(moving)[-1] == ["head", OTHER]
    moving.head.stage_planners[-1].answer = plan_over("head", OTHER)
    moving.head.tick()
    assert moving.nodes(job_id) == [moving.other.node]


def test_box_that_was_removing_its_part_gets_it_anew(moving: Moving) -> None:
    job_id = divided(moving)
    moving.until(lambda: moving.state(job_id) == "ready")
    lose(moving)
    moving.head.tick()
    moving.head.stage_planners[-1].answer = plan_over("head", OTHER)
    moving.head.tick()
    lose(moving, OTHER)
    with moving.head.database.write() as session:
        assert PartRepository(session).find(job_id, moving.box.node).state == PartState.LEAVING.value  # type: ignore[union-attr]
        BoxRepository(session).set(moving.row.id, seen_at=time.time())
    moving.head.tick()
    assert planned_boxes(moving)[-1] == ["head", NAME]
    moving.head.stage_planners[-1].answer = plan_over("head", NAME)
    moving.head.tick()
    assert moving.nodes(job_id) == [moving.box.node]
    moving.go_on(lambda: alive(moving) == [True, True, False])


def test_division_without_its_parts_is_not_in_force(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was killed between the write of the new division and that of its parts."""
    job_id = divided(moving)
    lose(moving)
    moving.head.tick()
    moving.head.stage_planners[-1].answer = plan_over("head", OTHER)
    with monkeypatch.context() as patch:
        patch.setattr(PartRepository, "give", fail)
        moving.head.tick()
    stored = stages_of(moving.head.settings, job_id)
    assert stored is not None
    assert (stored.boxes, moving.nodes(job_id)) == (("head", OTHER), [moving.box.node])
    moving.restart_all()
    moving.agent.tick()
    moving.head.tick()
    assert "is being made" in reason(moving, job_id)
    moving.head.stage_planners[-1].answer = plan_over("head", NAME)
    moving.go_on(lambda: alive(moving) == [True, True, False])
    assert moving.box.runners.started[-1].box_names == ("head", NAME)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_plan_in_flight_is_dropped_when_the_job_is_resumed_over_another_number_of_boxes(
    moving: Moving, before: int, after: int
) -> None:
    """It was paused and resumed between two passes."""
    job_id = moving.prepare(boxes=before)
    moving.head.tick()
    moving.request(Instruction.PAUSE, job_id)
    moving.request(Instruction.RESUME, job_id, boxes=after)
    moving.head.tick()
    assert moving.head.stage_planners[0].stopped
    assert [planner.request.num_boxes for planner in moving.head.stage_planners] == [before, after]
    names = ["head", NAME, OTHER][:after]
    moving.head.stage_planners[-1].answer = plan_over(*names)
    moving.head.tick()
    assert len(moving.nodes(job_id)) == after - 1


def test_chosen_boxes_are_as_many_as_the_job_asks_for_now(moving: Moving) -> None:
    job_id = moving.prepare(boxes=3)
    moving.head.dispatcher._queue.boxes.choose(job_id, [NAME, OTHER])
    moving.request(Instruction.PAUSE, job_id)
    moving.request(Instruction.RESUME, job_id, boxes=2)
    moving.head.tick()
    assert [planner.request.num_boxes for planner in moving.head.stage_planners] == [2]


def test_reservation_ends_when_its_part_is_not_in_force_any_more(moving: Moving) -> None:
    job_id = divided(moving)
    moving.until(lambda: moving.state(job_id) == "ready")
    with moving.head.database.write() as session:
        PartRepository(session).want(job_id, moving.box.node, attempt=1, link=None, is_over=False)
    assert reserved(moving, job_id)
    moving.request(Instruction.PAUSE, job_id)
    moving.request(Instruction.RESUME, job_id, boxes=["head", OTHER])
    moving.head.tick()
    assert moving.nodes(job_id) == [moving.box.node], "there is no other plan yet"
    assert not reserved(moving, job_id)


def fail(*_: object, **__: object) -> None:
    raise OSError("killed")


# --- boxes that a job keeps -------------------------------------------------------------------------------------------


def interrupted(moving: Moving, num_lost: int) -> str:
    """A job over two boxes that has lost so many attempts in a row, the last one just now."""
    job_id = start(moving, "head", NAME)
    moving.request(Instruction.RESUME, job_id)
    moving.go_on(lambda: alive(moving) == [True, True, False])
    with moving.head.database.write() as session:
        session.execute(update(Job).where(Job.id == job_id).values(num_lost=num_lost - 1))
    moving.end(job_id, INTERRUPTED, error={"code": "x", "message": "lost", "param": None})
    moving.go_on(lambda: moving.head.status(job_id) is JobStatus.QUEUED and moving.state(job_id) == "ready")
    return job_id


@pytest.mark.long
@pytest.mark.parametrize(("num_lost", "is_kept"), [(1, True), (4, False)])
def test_job_keeps_its_boxes_between_attempts_only_if_the_next_one_follows_soon(
    moving: Moving, num_lost: int, is_kept: bool
) -> None:
    moving.head.settings = moving.head.settings.model_copy(update={"max_attempts": 9})
    moving.head.new_dispatcher()
    job_id = interrupted(moving, num_lost)
    moving.head.tick()
    assert "was lost; the next one begins about" in reason(moving, job_id)
    assert reserved(moving, job_id) is is_kept
    other = moving.prepare(box=NAME, priority=1)
    moving.head.tick()
    assert (moving.head.job(other).node == moving.box.node) is not is_kept


@pytest.mark.long
def test_paused_job_frees_its_boxes_and_reserves_none_when_it_is_resumed(moving: Moving) -> None:
    job_id = interrupted(moving, 1)
    moving.head.tick()
    assert reserved(moving, job_id)
    moving.request(Instruction.PAUSE, job_id)
    moving.head.tick()
    part = moving.part(job_id)
    assert part is not None
    assert (part.attempt, part.link) == (0, None)
    moving.request(Instruction.RESUME, job_id)
    moving.agent.tick()
    moving.box.tick()
    assert moving.box.dispatcher._parts.hold is None, "nothing was decided yet"


def test_resumed_job_reserves_no_box_before_it_is_decided(moving: Moving) -> None:
    """Its last attempt was paused."""
    job_id = start(moving, "head", NAME)
    moving.head.tick()
    moving.request(Instruction.RESUME, job_id)
    moving.agent.tick()
    moving.box.tick()
    assert moving.box.dispatcher._parts.hold is None


@pytest.mark.long
def test_reservation_is_not_written_for_a_job_that_has_changed(moving: Moving) -> None:
    job_id = interrupted(moving, 1)
    moving.head.tick()
    seen = moving.head.job(job_id)
    with moving.head.database.read() as session:
        parts = PartRepository(session).of_job(job_id)
    moving.request(Instruction.PAUSE, job_id)
    with pytest.raises(StatusConflict):
        moving.head.dispatcher._spread.reserve(seen, parts, is_wanted=False)
    with pytest.raises(StatusConflict):
        moving.head.dispatcher._spread.reserve(replaced(seen, lease_holder="another"), parts, is_wanted=False)
    assert reserved(moving, job_id)


def replaced(job: Job, **values: object) -> Job:
    columns = {column.key: getattr(job, column.key) for column in Job.__mapper__.column_attrs}
    return Job(**(columns | values))


def test_job_that_a_person_has_to_mend_leaves_its_boxes_to_others(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = start(moving, "head", NAME)
    moving.go_on(lambda: moving.state(job_id) == "ready")
    monkeypatch.setattr("windlass.service.dispatcher.parts.spread.link_host_of", lambda _: None)
    moving.request(Instruction.RESUME, job_id)
    other = moving.prepare(box=NAME, priority=1)
    moving.head.tick()
    assert "start it with `windlass up --cluster-host IP`" in reason(moving, job_id)
    assert moving.head.job(other).node == moving.box.node
    assert not reserved(moving, job_id)


@pytest.mark.long
def test_box_begins_no_job_of_lower_priority_between_a_move_and_the_next_attempt(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.resume(job_id, 3, plan_over("head", OTHER, NAME))
    moving.go_on(lambda: alive(moving) == [True, True, True])
    other = moving.prepare(box=NAME, priority=1)
    moving.give(other)
    moving.end(job_id, MOVED)
    held = list[bool]()

    def next_attempt_begins() -> bool:
        held.append(moving.box.dispatcher._parts.hold is not None)
        return (job_id, 3) in moving.box.runners.alive

    moving.go_on(next_attempt_begins)
    assert all(held), "in every pass of the box's scheduler"
    assert moving.box.runners.alive == {(job_id, 3)}
    assert moving.head.job(other).node == moving.box.node


@pytest.mark.long
def test_box_that_cannot_store_a_new_division_says_why_and_frees_the_others(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = start(moving, "head", NAME)
    moving.resume(job_id, 3, plan_over("head", OTHER, NAME))
    moving.go_on(lambda: alive(moving) == [True, True, True])
    with monkeypatch.context() as patch:
        patch.setattr("windlass.service.cluster.box.parts.keep_told_stages", fail)
        moving.end(job_id, MOVED)
        moving.go_on(lambda: "cannot store its new division: killed" in reason(moving, job_id))
        assert reserved(moving, job_id)
        moving.head.now += 60
        moving.go_on(lambda: not reserved(moving, job_id))
        assert "cannot store its new division: killed" in reason(moving, job_id)
    moving.go_on(lambda: moving.head.job(job_id).attempt == 3 and alive(moving) == [True, True, True])


# --- new divisions ----------------------------------------------------------------------------------------------------


def test_new_plan_over_a_box_that_goes_away_does_not_keep_others_from_theirs(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.request(Instruction.RESUME, job_id, boxes=["head", OTHER])
    moving.head.tick()
    assert planned_boxes(moving)[-1] == ["head", OTHER]
    lose(moving, OTHER)
    later = moving.prepare(boxes=2)
    moving.head.tick()
    assert moving.head.stage_planners[1].stopped
    assert f"box {OTHER} is away" in reason(moving, job_id)
    assert planned_boxes(moving)[-1] == ["head", NAME]
    moving.head.stage_planners[-1].answer = plan_over("head", NAME)
    moving.head.tick()
    assert moving.nodes(later) == [moving.box.node]


@pytest.mark.long
def test_attempt_after_a_move_waits_for_the_parts_of_its_division(moving: Moving) -> None:
    """The end of the move is imported in the pass that has read the parts before it."""
    job_id = start(moving, "head", NAME)
    moving.request(Instruction.RESUME, job_id)
    moving.go_on(lambda: alive(moving) == [True, True, False])
    with moving.head.database.read() as session:
        given = PartRepository(session).of_job(job_id)
    job, spread = moving.head.job(job_id), moving.head.dispatcher._spread
    assert spread.why_no_attempt(job, given) is None
    with moving.head.database.write() as session:
        PartRepository(session).place(job_id, moving.box.node, None)
    wait = spread.why_no_attempt(job, given)
    assert wait is not None
    assert (wait.reason, wait.is_soon) == ("its boxes have changed", True)
    keep_stages(moving.head.settings, job_id, plan_over("head", OTHER))
    with moving.head.database.write() as session:
        PartRepository(session).place(job_id, moving.box.node, 1)
        PartRepository(session)._change(job_id, moving.box.node, state=PartState.READY.value)
    wait = spread.why_no_attempt(job, given)
    assert wait is not None, "its part is of another division"
    assert not wait.is_soon


def test_job_that_was_resumed_within_a_pass_does_not_begin_on_its_old_boxes(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = start(moving, "head", NAME)
    moving.go_on(lambda: moving.state(job_id) == "ready")
    dispatcher, verdicts = moving.head.dispatcher, moving.head.dispatcher._queue.verdicts

    def resume_first(*arguments: Any) -> Any:
        moving.request(Instruction.RESUME, job_id, boxes=["head", OTHER])
        return verdicts(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(dispatcher._queue, "verdicts", resume_first)
        moving.head.tick()
    assert (moving.head.status(job_id), moving.head.job(job_id).attempt) == (JobStatus.QUEUED, 1)
    moving.head.tick()
    assert planned_boxes(moving)[-1] == ["head", OTHER]


def test_job_with_states_is_not_planned_as_if_it_had_none(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.request(Instruction.RESUME, job_id, boxes=["head", OTHER])
    boxes, spread = moving.head.dispatcher._queue.boxes, moving.head.dispatcher._spread
    boxes.read()
    pool, num_before = [boxes.by_name[OTHER]], len(moving.head.stage_planners)
    assert spread.give(moving.head.job(job_id), pool, [pool]) is not None
    assert len(moving.head.stage_planners) == num_before
    spread._fail(moving.head.job(job_id), pool, "does_not_fit", "cellar lacks 3 GiB")
    assert moving.head.status(job_id) is JobStatus.QUEUED


@pytest.mark.long
def test_new_plan_that_chooses_among_boxes_begins_again_when_one_goes_away(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.request(Instruction.RESUME, job_id, boxes=3)
    moving.head.tick()
    lose(moving, OTHER)
    moving.head.tick()
    assert moving.head.stage_planners[-1].stopped
    assert "it asks for 3 boxes, and 2 are open to it" in reason(moving, job_id)


def planned_step(moving: Moving, job_id: str) -> str | None:
    """Reads the planned step that the API shows."""
    path = moving.head.settings.jobs_dir / job_id / "prepare" / "simulated" / "step-4.json"
    return path.read_text() if path.exists() else None


def simulate(moving: Moving, job_id: str, text: str) -> None:
    """The planner leaves a simulated step beside its answer."""
    folder = Path(moving.head.settings.jobs_dir / job_id / "prepare" / "stages.partial" / "simulated")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step-4.json").write_text(text)


@pytest.mark.long
def test_planned_step_that_cannot_be_stored_keeps_no_job_from_its_boxes(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, failed = Path.rename, list[str]()

    def fail_if_simulated(path: Path, target: Path) -> Path:
        if target.name != "simulated":
            return rename(path, target)
        failed.append(target.name)
        raise OSError("no room")

    monkeypatch.setattr(Path, "rename", fail_if_simulated)
    job_id = start(moving, "head", NAME)
    moving.resume(job_id, 3, plan_over("head", NAME, OTHER))
    moving.go_on(lambda: alive(moving) == [True, True, True])
    moving.end(job_id, MOVED)
    moving.go_on(lambda: moving.head.job(job_id).attempt == 3 and alive(moving) == [True, True, True])
    assert len(failed) == 2, "when it was first divided, and when its states had been moved"


@pytest.mark.long
def test_planned_step_is_that_of_the_division_in_force(moving: Moving) -> None:
    job_id = moving.prepare(boxes=["head", NAME])
    moving.head.tick()
    simulate(moving, job_id, "first")
    moving.head.stage_planners[-1].answer = plan_over("head", NAME)
    moving.go_on(lambda: alive(moving) == [True, True, False])
    moving.begin(job_id)
    moving.pause(job_id)
    assert planned_step(moving, job_id) == "first"
    for is_given_up in (True, False):
        moving.request(Instruction.RESUME, job_id, boxes=3)
        moving.head.tick()
        simulate(moving, job_id, "next")
        moving.head.stage_planners[-1].answer = plan_over("head", NAME, OTHER)
        moving.go_on(lambda: next_stages_of(moving.head.settings, job_id))
        assert planned_step(moving, job_id) == "first", "the states have not been moved yet"
        if is_given_up:
            moving.request(Instruction.PAUSE, job_id)
            moving.request(Instruction.RESUME, job_id, boxes=["head", NAME])
            moving.go_on(lambda: alive(moving) == [True, True, False])
            assert planned_step(moving, job_id) == "first"
            moving.pause(job_id)
    moving.go_on(lambda: alive(moving) == [True, True, True])
    moving.end(job_id, MOVED)
    moving.go_on(lambda: moving.head.job(job_id).attempt == 4)
    assert planned_step(moving, job_id) == "next"
