"""Jobs that go on from one box over several, and back: a head and two boxes, with real dispatchers and agents."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.orm import Session

from tests.support.service.cluster_stage import NAME
from tests.unit.service.cluster.test_moved_jobs import OTHER, Moving, alive, moving, plan_over, start
from windlass.actors.runtime.moving.division import MOVED
from windlass.actors.runtime.moving.progress import MoveProgress
from windlass.actors.worker_policy.stages import Stage as Blocks
from windlass.planner.stages.stages_plan import StagesPlan
from windlass.service.cluster.box.agent import Agent
from windlass.service.cluster.box.connection import HeadUnreachable
from windlass.service.jobs import stage_plans
from windlass.service.jobs.plan_files import load_plan
from windlass.service.jobs.stage_plans import division_of, keep_stages, next_stages_of, stages_of
from windlass.service.preparation.pipeline import PreparationError
from windlass.storage.ids import Attempt
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.boxes import Instruction

__all__ = ["moving"]

ARENA_NBYTES = 5 << 20


def on_one_box(moving: Moving) -> str:
    """A job on the head's box that was paused in its first attempt."""
    job_id = moving.prepare(box="head")
    moving.go_on(lambda: moving.head.runners.alive)
    moving.begin(job_id)
    moving.pause(job_id)
    return job_id


def plan_of(moving: Moving, job_id: str, *names: str) -> StagesPlan:
    """A plan over these boxes with the numbers of the job's division so far."""
    before = division_of(moving.head.settings, moving.head.job(job_id))
    assert before is not None
    plan = replace(plan_over(*names), num_microbatches=before.num_microbatches, update_order=before.update_order)
    if len(names) > 1:
        return plan
    return replace(plan, step_s=2.0, stages=(replace(plan.stages[0], arena_nbytes=ARENA_NBYTES),))


def windlass_of(moving: Moving, job_id: str) -> tuple[object, object]:
    """The boxes and the box that a job asks for."""
    asked = moving.head.job(job_id).windlass
    return asked.get("boxes"), asked.get("box")


def epoch_of(moving: Moving, job_id: str) -> int:
    plan = stages_of(moving.head.settings, job_id)
    assert plan is not None
    return plan.layout_epoch


def test_job_moves_from_one_box_to_two_and_back(moving: Moving) -> None:
    job_id = on_one_box(moving)
    assert stages_of(moving.head.settings, job_id) is None, "a job that was never divided has no division"
    moving.resume(job_id, 2, plan_of(moving, job_id, "head", NAME))
    moving.go_on(lambda: alive(moving) == [True, True, False])
    request = moving.head.stage_planners[-1].request
    assert (request.num_boxes, request.chooses_microbatches, request.chooses_order) == (2, False, False)
    moves = [stage.runners.moves[-1] for stage in (moving.head, moving.box)]
    assert len({(move.holders, move.owners) for move in moves}) == 1
    assert (moves[0].holders, moves[0].owners) == ((Blocks(0, 4), None), (Blocks(0, 3), Blocks(3, 4)))
    assert [(move.old is None, move.new is None) for move in moves] == [(False, False), (True, False)]
    assert moves[0].old is not None
    assert (moves[0].old.layout_epoch, moves[0].old.stages, moves[0].epoch) == (0, (), 1)
    assert windlass_of(moving, job_id) == (2, None)
    assert moving.head.job(job_id).estimated_finish is None
    MoveProgress(Path(moves[0].any.job_dir), Attempt(2), "", 100).note(10)
    moving.head.tick()
    told = "its states to be moved to its new boxes: 10 bytes of 100 bytes are there"
    assert moving.head.job(job_id).waiting_reason == told
    moving.end(job_id, MOVED)
    moving.go_on(lambda: moving.head.job(job_id).attempt == 3 and alive(moving) == [True, True, False])
    specs = [stage.runners.started[-1] for stage in (moving.head, moving.box)]
    assert [(spec.box, spec.layout_epoch, spec.attempt) for spec in specs] == [(0, 1, 3), (1, 1, 3)]
    assert load_plan(moving.head.settings, moving.head.job(job_id)) is None

    moving.pause(job_id)
    moving.resume(job_id, ["head"], plan_of(moving, job_id, "head"))
    moving.go_on(lambda: alive(moving) == [True, True, False])
    assert [box.name for box in moving.head.stage_planners[-1].request.boxes] == ["head"]
    move = moving.head.runners.moves[-1]
    assert (move.holders, move.owners) == ((Blocks(0, 3), Blocks(3, 4)), (Blocks(0, 4), None))
    assert move.new is not None
    assert (move.new.stages, move.new.host_memory_nbytes) == ((), ARENA_NBYTES)
    moving.end(job_id, MOVED)
    moving.go_on(lambda: moving.head.job(job_id).attempt == 5 and alive(moving) == [True, False, False])
    spec = moving.head.runners.started[-1]
    assert (spec.layout_epoch, spec.stages, spec.box_names, spec.host_memory_nbytes) == (2, (), (), ARENA_NBYTES)
    assert windlass_of(moving, job_id) == (None, None)
    assert moving.head.job(job_id).estimated_finish is not None, "by the new plan"
    moving.go_on(lambda: not moving.has_part(moving.box, job_id))
    assert moving.nodes(job_id) == []
    assert not (moving.box.settings.jobs_dir / job_id).exists()
    assert "Goes on on box head, which has all of its states now" in moving.head.messages(job_id)


def test_pace_over_two_boxes_says_nothing_of_a_job_that_came_to_one_without_a_plan(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.resume(job_id, 1, replace(plan_of(moving, job_id, "head"), step_s=None, stages=plan_over("head").stages))
    moving.go_on(lambda: alive(moving) == [True, True, False])
    with closing(moving.head.journal(job_id, 2)) as journal:  # as if these were steps of the attempt before
        journal.append(
            "metrics", "a step", step=1, train_loss=1.0, total_steps=4, remaining_s=6.0, remaining_is_estimate=False
        )
    moving.head.tick()
    moving.end(job_id, MOVED)
    moving.go_on(lambda: moving.head.job(job_id).attempt == 3 and alive(moving) == [True, False, False])
    job = moving.head.job(job_id)
    assert (job.step, job.estimated_finish, job.finish_is_measured) == (1, None, False)
    assert moving.head.runners.started[-1].expected_pace is None


@pytest.mark.long
@pytest.mark.parametrize("names", [("head",), ("head", NAME)])
def test_all_processes_killed_at_each_moment_leave_one_division(moving: Moving, names: tuple[str, ...]) -> None:
    job_id = on_one_box(moving) if len(names) == 1 else start(moving, *names)
    after = ("head", OTHER) if len(names) == 1 else ("head",)
    moving.request(Instruction.RESUME, job_id, boxes=list(after))
    ended = False
    for number in range(80):
        moving.work()
        if number % 2:
            continue  # files that are fetched are lost with their agent
        for planner in moving.head.stage_planners:
            planner.answer = planner.answer or plan_of(moving, job_id, *after)
        moving.head.tick()  # a planner is lost with its dispatcher
        moving.restart_all()
        division = division_of(moving.head.settings, moving.head.job(job_id))
        assert division is not None
        assert division.boxes == (after if ended and division.layout_epoch else names)
        runs = moving.head.runners.alive
        if not ended and moving.head.runners.moves and runs and alive(moving)[2 if after[1:] else 1]:
            moving.end(job_id, MOVED)
            ended = True
        elif runs and moving.head.job(job_id).attempt == 3:
            break
    assert moving.head.job(job_id).attempt == 3
    assert moving.head.runners.started[-1].layout_epoch == 1
    assert len(moving.head.runners.moves) == 1


@pytest.mark.long
def test_move_from_one_box_that_fails_leaves_the_job_where_it_was(moving: Moving) -> None:
    job_id = on_one_box(moving)
    moving.resume(job_id, ["head", OTHER], plan_of(moving, job_id, "head", OTHER))
    moving.go_on(lambda: alive(moving) == [True, False, True])
    moving.end(job_id, "failed", error={"code": "start_failed", "message": "no room on box cellar", "param": None})
    moving.go_on(lambda: moving.head.status(job_id) is JobStatus.PAUSED)
    assert "could not be moved: no room on box cellar" in moving.head.messages(job_id)[-1]
    assert epoch_of(moving, job_id) == 0
    moving.request(Instruction.RESUME, job_id, boxes=1)
    moving.go_on(lambda: moving.head.runners.alive)
    spec = moving.head.runners.started[-1]
    assert (spec.attempt, spec.layout_epoch, spec.stages) == (3, 0, ())
    assert windlass_of(moving, job_id) == (None, None)
    assert next_stages_of(moving.head.settings, job_id) is None
    moving.go_on(lambda: not moving.has_part(moving.other, job_id))


@pytest.mark.long
def test_move_to_one_box_that_was_decided_is_ended_before_the_states_move_back(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.resume(job_id, 1, plan_of(moving, job_id, "head"))
    moving.go_on(lambda: alive(moving) == [True, True, False])
    moving.cut_off_decided(job_id, 1)
    moving.request(Instruction.RESUME, job_id, boxes=["head", NAME])
    moving.go_on(lambda: alive(moving) == [True, True, False])
    assert moving.head.runners.moves[-1].epoch == 1
    moving.end(job_id, MOVED)
    moving.go_on(lambda: len(moving.head.stage_planners) == 3)
    assert windlass_of(moving, job_id) == (["head", NAME], None)
    moving.head.stage_planners[-1].answer = plan_of(moving, job_id, "head", NAME)
    moving.go_on(lambda: alive(moving) == [True, True, False] and len(moving.head.runners.moves) == 3)
    move = moving.head.runners.moves[-1]
    assert (move.epoch, move.holders) == (2, (Blocks(0, 4), None))


def test_job_that_does_not_fit_the_new_boxes_stays_on_one(moving: Moving) -> None:
    job_id = on_one_box(moving)
    moving.request(Instruction.RESUME, job_id, boxes=2)
    moving.go_on(lambda: moving.head.stage_planners)
    moving.head.stage_planners[-1].answer = PreparationError("does_not_fit", "attic lacks 3 GiB", None)
    moving.go_on(lambda: moving.head.status(job_id) is JobStatus.PAUSED)
    assert "attic lacks 3 GiB. It stays on head; resume it" in moving.head.messages(job_id)[-1]
    assert windlass_of(moving, job_id) == (None, None)
    moving.request(Instruction.RESUME, job_id)
    moving.go_on(lambda: moving.head.runners.alive)
    assert (moving.head.runners.started[-1].layout_epoch, moving.head.job(job_id).attempt) == (0, 2)


def test_box_begins_no_attempt_of_a_division_that_it_has_not_got(moving: Moving) -> None:
    """It has told of the end of the move before the head has, so its part is ready when the next attempt begins."""
    job_id = on_one_box(moving)
    moving.resume(job_id, 2, plan_of(moving, job_id, "head", NAME))
    moving.go_on(lambda: alive(moving) == [True, True, False])
    moving.end(job_id, MOVED)
    for _ in range(3):
        moving.box.tick()
        moving.agent.tick()
    moving.go_on(lambda: alive(moving) == [True, True, False])
    assert moving.head.job(job_id).attempt == 3
    spec = moving.box.runners.started[-1]
    assert (spec.attempt, spec.box, spec.layout_epoch) == (3, 1, 1)
    assert not [message for message in moving.head.messages(job_id) if "could not begin" in message]


@pytest.mark.parametrize("was_divided", [False, True])
def test_job_that_has_not_begun_is_planned_on_the_boxes_with_which_it_is_resumed(
    moving: Moving, was_divided: bool
) -> None:
    """Also if it was divided over a box that was removed before it began."""
    job_id = moving.prepare(boxes=2)
    if was_divided:
        keep_stages(moving.head.settings, job_id, plan_over("head", NAME))
    moving.request(Instruction.PAUSE, job_id)
    moving.request(Instruction.RESUME, job_id, boxes=1)
    moving.go_on(lambda: moving.head.stage_planners)
    plan = plan_over("head")
    planned = replace(plan, stages=(replace(plan.stages[0], arena_nbytes=ARENA_NBYTES),))
    moving.head.stage_planners[-1].answer = planned
    moving.go_on(lambda: moving.head.runners.alive)
    spec = moving.head.runners.started[-1]
    assert (spec.attempt, spec.stages, spec.host_memory_nbytes) == (1, (), ARENA_NBYTES)
    assert spec.training.num_microbatches == planned.num_microbatches
    assert windlass_of(moving, job_id) == (None, "head"), "on no other box"
    assert stages_of(moving.head.settings, job_id) is None


class Killed(BaseException):
    """Stands for the end of the head's dispatcher."""


class Faults:
    """Kills the head's dispatcher around its writes, and cuts calls of the boxes, before they arrive or afterwards."""

    def __init__(self, moving: Moving, patch: pytest.MonkeyPatch, seed: int) -> None:
        self._moving, self._random, self._is_armed = moving, random.Random(seed), False
        self.num_killed = 0
        write, write_file, tick = Database.write, stage_plans.write_durably, moving.head.tick
        tick_agent = Agent.tick
        faults = self

        @contextmanager
        def write_or_die(database: Database) -> Iterator[Session]:
            faults._die(database is moving.head.database)
            with write(database) as session:
                yield session
            faults._die(database is moving.head.database)

        def write_file_or_die(path: Path, text: str) -> None:
            faults._die(path.is_relative_to(moving.head.settings.home))
            write_file(path, text)
            faults._die(path.is_relative_to(moving.head.settings.home))

        def tick_or_die() -> None:
            faults._is_armed = True
            try:
                tick()
            except Killed:
                faults._is_armed = False
                faults.num_killed += 1
                moving.head.dispatcher._spread.close()  # the sockets of a killed process are closed
                moving.head.new_dispatcher()
            finally:
                faults._is_armed = False

        def tick_or_be_cut(agent: Agent) -> None:
            with suppress(HeadUnreachable):
                tick_agent(agent)

        patch.setattr(Agent, "tick", tick_or_be_cut)
        patch.setattr(Database, "write", write_or_die)
        patch.setattr(stage_plans, "write_durably", write_file_or_die)
        patch.setattr(moving.head, "tick", tick_or_die)
        for client in (moving.client, moving.other_client):
            client.event_hooks = {"request": [_cut_each(5, "/sync")], "response": [_cut_each(3, "/sync")]}

    def _die(self, is_of_head: bool) -> None:
        is_mine = is_of_head and self._is_armed and threading.current_thread() is threading.main_thread()
        if is_mine and self._random.random() < 0.25:
            raise Killed


def _cut_each(number: int, path: str) -> Callable[[Any], None]:
    """Returns a hook that raises an error for every so many requests, or answers, of a path that ends so."""
    calls = itertools.count(1)

    def hook(told: Any) -> None:
        url = told.url if isinstance(told, httpx.Request) else told.request.url
        if url.path.endswith(path) and next(calls) % number == 0:
            raise httpx.ReadError("the link was cut")

    return hook


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("names", [("head",), ("head", NAME)])
def test_head_killed_at_any_write_and_calls_cut_leave_one_division(
    moving: Moving, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], seed: int
) -> None:
    job_id = on_one_box(moving) if len(names) == 1 else start(moving, *names)
    after = ("head", OTHER) if len(names) == 1 else ("head",)
    plan = plan_of(moving, job_id, *after)
    moving.request(Instruction.RESUME, job_id, boxes=list(after))
    faults, ended = Faults(moving, monkeypatch, seed), False
    for _ in range(200):
        moving.work()
        moving.head.now += 20  # so that lost attempts are followed at once
        for planner in moving.head.stage_planners:
            planner.answer = planner.answer or plan
        if moving.head.status(job_id) is JobStatus.PAUSED:
            moving.request(Instruction.RESUME, job_id)
        division = division_of(moving.head.settings, moving.head.job(job_id))
        assert division is not None
        assert (division.boxes, division.layout_epoch) in [(names, 0), *([(after, 1)] if ended else [])]
        is_move = next_stages_of(moving.head.settings, job_id) is not None
        runs = [
            (job_id, moving.head.job(job_id).attempt) in stage.runners.alive
            for stage in (moving.head, moving.box, moving.other)
        ]
        wanted = [True, len(names) > 1 and is_move, len(after) > 1]
        if runs == wanted and is_move and moving.head.runners.moves:
            moving.end(job_id, MOVED)
            ended = True
        elif runs == wanted and not is_move and ended:
            break
    else:
        raise AssertionError(moving.facts())
    assert faults.num_killed > 2
    spec = moving.head.runners.started[-1]
    assert (spec.layout_epoch, spec.stages != ()) == (1, len(after) > 1)
    assert windlass_of(moving, job_id) == (list(after) if len(after) > 1 else None, None)
