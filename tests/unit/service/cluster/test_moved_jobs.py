"""Jobs over several boxes that resume over others: two boxes and a head, with real dispatchers and agents."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from tests.support.service.cluster_stage import NAME, add_box
from tests.support.service.dispatcher_stage import Stage
from tests.support.service.spread_stage import PLAN, STAGES, Spread
from windlass.actors.runtime.moving.division import MOVED
from windlass.actors.scheduler.scheduler import INTERRUPTED, PAUSED
from windlass.actors.worker_policy.stages import Stage as Blocks
from windlass.planner.stages.stages_plan import StagesPlan
from windlass.service.cluster.box.agent import Agent, BoxFunctions
from windlass.service.cluster.box.connection import HeadConnection
from windlass.service.cluster.box.head_link import HeadLink
from windlass.service.jobs.stage_plans import next_stages_of, stages_of
from windlass.service.preparation.pipeline import PreparationError
from windlass.storage.ids import LayoutEpoch, Step
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job, JobPart
from windlass.storage.sql.repositories.boxes import Instruction, MirrorRepository, PartRepository
from windlass.storage.store.decisions import DECISIONS_FILE, Decision, DecisionLog

OTHER = "cellar"


def plan_over(*names: str) -> StagesPlan:
    """A plan of the four blocks over these boxes."""
    bounds = [0, *range(4 - len(names) + 1, 5)]
    stages = tuple(
        replace(STAGES[0], box=name, first_block=first, stop_block=stop)
        for name, first, stop in zip(names, bounds[:-1], bounds[1:], strict=True)
    )
    return replace(PLAN, stages=stages)


class Moving(Spread):
    """A head and two boxes, the second of which has an agent of its own."""

    def __init__(self, folder: Path, head: Database, box: Database, other: Database) -> None:
        super().__init__(folder, head, box)
        self.other = Stage(folder / OTHER, other)
        self.other.settings = self.other.settings.model_copy(update={"link_host": "127.0.0.1"})
        for name in ("link.pem", "authority.pem"):
            (self.other.settings.home / "cluster").mkdir(exist_ok=True)
            (self.other.settings.home / "cluster" / name).write_text("")
        self.other.new_dispatcher()
        add_box(head, OTHER, self.other.node, head=self.head.node)
        assert self.server is not None
        self.other_client = httpx.Client(
            base_url=self.server.url, headers={"X-Box": OTHER}, trust_env=False, timeout=20
        )
        self.other_agent = self.new_other_agent()
        self.other_agent.tick()

    def new_other_agent(self) -> Agent:
        functions = BoxFunctions(facts=self.agent._functions.facts, capacity=self.agent._functions.capacity)
        link = HeadLink(HeadConnection(self.other_client))
        self.other_agent = Agent(
            self.other.database, self.other.settings, link, functions, name=OTHER, clock=lambda: self.now
        )
        return self.other_agent

    def close(self) -> None:
        self.other_agent.close()
        self.other_client.close()
        super().close()

    def work(self) -> None:
        """Lets all three boxes work once."""
        self.head.now += 1
        self.box.now += 1
        self.other.now += 1
        self.now += 1
        for agent, stage in ((self.agent, self.box), (self.other_agent, self.other)):
            agent.tick()
            stage.tick()
            for transfer in list(agent._takings._transfers.values()):
                transfer.retry_at = 0.0
                if transfer.task is not None:
                    transfer.task.exception(timeout=20)
        self.head.tick()

    def go_on(self, is_so: Callable[[], Any]) -> None:
        for _ in range(60):
            if is_so():
                return
            self.work()
        raise AssertionError(f"it did not come to be so: {self.facts()}")

    def facts(self) -> str:
        """Says what the head knows of all jobs."""
        with self.head.database.read() as session:
            jobs = session.scalars(select(Job)).all()
            parts = session.scalars(select(JobPart)).all()
        told = [(job.status, job.attempt, job.waiting_reason, self.head.messages(job.id)[-4:]) for job in jobs]
        return f"{told} {[(part.node, part.position, part.state, part.served, part.told) for part in parts]}"

    def restart_all(self) -> None:
        """Kills all agents and dispatchers, and starts them anew."""
        self.agent.close()
        self.new_agent()
        self.other_agent.close()
        self.new_other_agent()
        self.box.new_dispatcher()
        self.other.new_dispatcher()
        self.head.dispatcher._spread.close()
        self.head.new_dispatcher()

    def pause(self, job_id: str) -> None:
        self.request(Instruction.PAUSE, job_id)
        self.head.tick()
        self.end(job_id, PAUSED)
        self.go_on(lambda: self.head.status(job_id) is JobStatus.PAUSED)

    def request(self, kind: Instruction, job_id: str, **options: Any) -> None:
        with self.head.database.write() as session:
            MirrorRepository(session).request(kind, job_id, here=self.head.node, **options)

    def end(self, job_id: str, status: str, **more: Any) -> None:
        """Ends the attempt on all boxes, as runners do."""
        attempt = self.head.job(job_id).attempt
        with closing(self.head.journal(job_id, attempt)) as journal:
            journal.append_outcome(status, "over", **more)
        for stage in (self.head, self.box, self.other):
            if (job_id, attempt) in stage.runners.alive:
                stage.end_runner(job_id, attempt)

    def resume(self, job_id: str, boxes: int | list[str], plan: StagesPlan) -> None:
        """Resumes a paused job over other boxes, and plans it."""
        self.request(Instruction.RESUME, job_id, boxes=boxes)
        num_before = len(self.head.stage_planners)
        self.go_on(lambda: len(self.head.stage_planners) > num_before)
        self.head.stage_planners[-1].answer = plan

    def nodes(self, job_id: str) -> list[str]:
        """The homes of the boxes that have parts, in their order."""
        with self.head.database.read() as session:
            return [part.node for part in PartRepository(session).of_job(job_id)]

    def has_part(self, stage: Stage, job_id: str) -> bool:
        with stage.database.read() as session:
            return PartRepository(session).find(job_id, stage.node) is not None

    def decide(self, job_id: str, epoch: int) -> None:
        """Appends the decision of a move to the job's log, as the engine does."""
        with closing(DecisionLog(self.head.settings.jobs_dir / job_id / DECISIONS_FILE)) as log:
            decision = Decision.make(
                step=Step(3),
                attempt=self.head.runners.started[-1].attempt,
                epoch=LayoutEpoch(epoch),
                trainer_state="{}",
            )
            log.append(decision)

    def cut_off_decided(self, job_id: str, epoch: int) -> None:
        """Ends a move on all boxes after its decision, without the outcome that says so. The job is paused."""
        self.decide(job_id, epoch)
        self.end(job_id, "failed", error={"code": "start_failed", "message": "killed", "param": None})
        self.go_on(lambda: self.head.status(job_id) is JobStatus.PAUSED)


@pytest.fixture
def moving(tmp_path: Path, databases: tuple[Database, Database], migrated_file: Path) -> Iterator[Moving]:
    shutil.copyfile(migrated_file, tmp_path / "other.db")
    other = Database(f"sqlite:///{tmp_path / 'other.db'}")
    moving = Moving(tmp_path, *databases, other)
    yield moving
    moving.head.dispatcher._spread.close()
    moving.close()
    other.close()


def start(moving: Moving, *names: str) -> str:
    """A job over these boxes that was paused in its first attempt."""
    job_id = moving.prepare(boxes=list(names))
    moving.go_on(lambda: moving.head.stage_planners)
    moving.head.stage_planners[-1].answer = plan_over(*names)
    moving.go_on(lambda: moving.head.runners.alive and moving.box.runners.alive)
    moving.begin(job_id)
    moving.pause(job_id)
    return job_id


def alive(moving: Moving) -> list[bool]:
    return [bool(stage.runners.alive) for stage in (moving.head, moving.box, moving.other)]


@pytest.mark.long
def test_job_moves_to_more_and_to_fewer_boxes_and_goes_on(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.resume(job_id, 3, plan_over("head", OTHER, NAME))
    moving.go_on(lambda: alive(moving) == [True, True, True])
    request = moving.head.stage_planners[-1].request
    assert (request.num_boxes, request.chooses_microbatches, request.chooses_order) == (3, False, False)
    moves = [stage.runners.moves[-1] for stage in (moving.head, moving.box, moving.other)]
    assert [(move.box, move.epoch, move.names) for move in moves] == [
        (box, 1, ("head", NAME, OTHER)) for box in range(3)
    ]
    assert [(move.old is None, move.new is None) for move in moves] == [(False, False), (False, False), (True, False)]
    assert len({(move.holders, move.owners) for move in moves}) == 1, "all boxes derive the same move"
    assert moves[0].holders == (Blocks(0, 3), Blocks(3, 4), None)
    assert moves[0].owners == (Blocks(0, 2), Blocks(3, 4), Blocks(2, 3))
    assert stages_of(moving.head.settings, job_id).layout_epoch == 0, "the old division is in force"  # type: ignore[union-attr]
    moving.end(job_id, MOVED)
    moving.go_on(lambda: moving.head.job(job_id).attempt == 3 and alive(moving) == [True, True, True])
    specs = [stage.runners.started[-1] for stage in (moving.head, moving.box, moving.other)]
    assert [(spec.box, spec.layout_epoch, spec.attempt) for spec in specs] == [(0, 1, 3), (2, 1, 3), (1, 1, 3)]
    assert len({spec.stages for spec in specs}) == 1
    assert moving.nodes(job_id) == [moving.other.node, moving.box.node]

    moving.pause(job_id)
    moving.resume(job_id, ["head", OTHER], plan_over("head", OTHER))
    moving.go_on(lambda: alive(moving) == [True, True, True])
    assert moving.box.runners.moves[-1].new is None
    moving.end(job_id, MOVED)
    moving.go_on(lambda: moving.head.job(job_id).attempt == 5 and alive(moving) == [True, False, True])
    moving.go_on(lambda: not moving.has_part(moving.box, job_id))
    assert moving.nodes(job_id) == [moving.other.node]
    assert not (moving.box.settings.jobs_dir / job_id).exists()
    specs = [stage.runners.started[-1] for stage in (moving.head, moving.other)]
    assert [(spec.box, spec.layout_epoch) for spec in specs] == [(0, 2), (1, 2)]


@pytest.mark.long
def test_all_processes_killed_at_each_moment_leave_one_division(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.request(Instruction.RESUME, job_id, boxes=3)
    ended_at = None
    for number in range(80):
        moving.work()
        if number % 2:
            continue  # files that are fetched are lost with their agent
        for planner in moving.head.stage_planners:
            planner.answer = planner.answer or plan_over("head", OTHER, NAME)
        moving.head.tick()  # a planner is lost with its dispatcher
        moving.restart_all()
        epochs = {
            plan.layout_epoch
            for stage in (moving.head, moving.box, moving.other)
            if (plan := stages_of(stage.settings, job_id)) is not None
        }
        assert epochs <= {0, 1}
        attempt = moving.head.job(job_id).attempt
        if ended_at is None and alive(moving) == [True, True, True]:
            moving.end(job_id, MOVED)
            ended_at = number
        elif attempt == 3 and alive(moving) == [True, True, True]:
            break
    assert [spec.layout_epoch for spec in (moving.head.runners.started[-1], moving.box.runners.started[-1])] == [1, 1]
    assert moving.head.job(job_id).attempt == 3


@pytest.mark.long
def test_new_division_that_could_not_be_written_to_the_database_is_in_force_afterwards(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = start(moving, "head", NAME)
    moving.resume(job_id, ["head", OTHER], plan_over("head", OTHER))
    moving.go_on(lambda: alive(moving) == [True, True, True])
    place, failed = PartRepository.place, list[str]()

    def fail_once(self: PartRepository, job_id: str, node: str, position: int | None) -> None:
        if not failed:
            failed.append(node)
            raise OSError("killed")
        place(self, job_id, node, position)

    with monkeypatch.context() as patch:
        patch.setattr(PartRepository, "place", fail_once)
        moving.end(job_id, MOVED)
        moving.head.tick()
        assert stages_of(moving.head.settings, job_id).layout_epoch == 1  # type: ignore[union-attr]
        assert moving.head.status(job_id) is JobStatus.RUNNING
        moving.head.dispatcher._spread.close()  # the sockets of a killed process are closed
        moving.head.new_dispatcher()
        moving.go_on(lambda: moving.head.job(job_id).attempt == 3 and alive(moving) == [True, False, True])
    assert moving.nodes(job_id) == [moving.other.node]


@pytest.mark.long
def test_move_that_is_lost_is_tried_again_and_then_pauses_the_job(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.resume(job_id, 3, plan_over("head", NAME, OTHER))
    for num_lost in (1, moving.head.settings.max_attempts):
        moving.go_on(lambda: alive(moving) == [True, True, True])
        with moving.head.database.write() as session:
            session.execute(update(Job).where(Job.id == job_id).values(num_lost=num_lost - 1))
        moving.end(job_id, INTERRUPTED, error={"code": "x", "message": "box cellar is gone", "param": None})
        moving.go_on(lambda: moving.head.status(job_id) is not JobStatus.RUNNING)
        assert moving.head.job(job_id).num_lost in (0, num_lost)
        moving.head.now += 300
    assert moving.head.status(job_id) is JobStatus.PAUSED
    assert "could not be moved: box cellar is gone" in moving.head.messages(job_id)[-1]
    assert stages_of(moving.head.settings, job_id).layout_epoch == 0  # type: ignore[union-attr]

    moving.request(Instruction.RESUME, job_id, boxes=["head", NAME])
    moving.go_on(lambda: alive(moving) == [True, True, False])
    spec = moving.box.runners.started[-1]
    assert (spec.layout_epoch, spec.box) == (0, 1)
    moving.go_on(lambda: not moving.has_part(moving.other, job_id))
    assert next_stages_of(moving.head.settings, job_id) is None


def test_move_that_cannot_be_done_pauses_the_job_with_the_reason(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.resume(job_id, 3, plan_over("head", NAME, OTHER))
    moving.go_on(lambda: alive(moving) == [True, True, True])
    moving.end(job_id, "failed", error={"code": "start_failed", "message": "no room on box cellar", "param": None})
    moving.go_on(lambda: moving.head.status(job_id) is JobStatus.PAUSED)
    assert "no room on box cellar" in moving.head.messages(job_id)[-1]


def test_decided_move_is_ended_though_the_job_was_resumed_on_its_old_boxes(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.resume(job_id, 3, plan_over("head", NAME, OTHER))
    moving.go_on(lambda: alive(moving) == [True, True, True])
    moving.cut_off_decided(job_id, 1)
    moving.request(Instruction.RESUME, job_id, boxes=["head", NAME])
    moving.go_on(lambda: alive(moving) == [True, True, True])
    assert moving.head.runners.moves[-1].epoch == 1
    moving.end(job_id, MOVED)
    moving.go_on(lambda: len(moving.head.stage_planners) == 3)
    assert stages_of(moving.head.settings, job_id).layout_epoch == 1  # type: ignore[union-attr]


@pytest.mark.long
def test_boxes_that_the_job_does_not_fit_leave_it_where_it_is(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.request(Instruction.RESUME, job_id, boxes=["head", OTHER])
    moving.go_on(lambda: len(moving.head.stage_planners) == 2)
    moving.head.stage_planners[-1].answer = PreparationError("does_not_fit", "cellar lacks 3 GiB", None)
    moving.go_on(lambda: moving.head.status(job_id) is JobStatus.PAUSED)
    assert "cellar lacks 3 GiB. It stays on head, attic; resume it" in moving.head.messages(job_id)[-1]
    assert moving.head.job(job_id).windlass["boxes"] == ["head", NAME]
    assert moving.head.job(job_id).waiting_reason is None
    moving.request(Instruction.RESUME, job_id)
    moving.go_on(lambda: alive(moving) == [True, True, False])
    assert moving.head.runners.started[-1].layout_epoch == 0


@pytest.mark.long
def test_box_that_lost_its_part_has_lost_it_also_in_a_move(moving: Moving) -> None:
    job_id = start(moving, "head", NAME)
    moving.resume(job_id, 3, plan_over("head", NAME, OTHER))
    moving.agent._takings.forget(job_id)
    with moving.box.database.write() as session:
        PartRepository(session).remove(job_id)
    moving.go_on(lambda: (moving.part(job_id) or JobPart()).state == "lost")
    moving.go_on(lambda: "has lost its part" in (moving.head.job(job_id).waiting_reason or ""))
    assert not any(alive(moving))
