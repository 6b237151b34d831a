"""A job over several boxes: a head and a box with real dispatchers and an agent, and stand-in runners."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update

from tests.support.service.boxes import make_capacity, make_facts
from tests.support.service.cluster_stage import NAME, Cluster, add_box
from tests.support.service.dispatcher_stage import Stage
from windlass.actors.job.errors import append_error
from windlass.actors.scheduler.scheduler import INTERRUPTED, PAUSED
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.planner.stages.stages_plan import StagePlan, StagesPlan
from windlass.service.cluster.box.agent import Agent, BoxFunctions
from windlass.service.cluster.box.parts import discard_parts
from windlass.service.dispatcher import dispatcher
from windlass.service.jobs.stage_plans import keep_stages, stages_digest, stages_of
from windlass.service.machine.fleet.content import taken_dir
from windlass.service.machine.fleet.messages import SyncRequest
from windlass.service.preparation.pipeline import PreparationError
from windlass.storage.ids import Attempt
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job, JobPart
from windlass.storage.sql.repositories.boxes import (
    HELD_FOR_PART,
    BoxRepository,
    BoxState,
    Instruction,
    MirrorRepository,
    PartRepository,
    PartState,
)

STAGES = tuple(
    StagePlan(
        box=box, first_block=first, stop_block=stop, placement=Placement(group_size=1), num_optimizers=1, peak_gib={}
    )
    for box, first, stop in (("head", 0, 2), (NAME, 2, 4))
)
PLAN = StagesPlan(num_ranks=1, num_microbatches=2, update_order=UpdateOrder.KEPT, step_s=None, stages=STAGES)


class Spread(Cluster):
    """Two boxes that can reach each other."""

    def __init__(self, folder: Path, head: Database, box: Database) -> None:
        super().__init__(folder, head, box)
        for stage in (self.head, self.box):
            stage.settings = stage.settings.model_copy(update={"link_host": "127.0.0.1"})
            folder = stage.settings.home / "cluster"
            folder.mkdir(exist_ok=True)
            for name in ("link.pem", "authority.pem"):
                (folder / name).write_text("")
            stage.new_dispatcher()
        self.agent.close()
        self.new_agent()
        self.agent.tick()

    def new_agent(self) -> Agent:
        functions = BoxFunctions(facts=lambda: make_facts(link_host="127.0.0.1"), capacity=make_capacity)
        settings, link = self.box.settings, self.link
        self.agent = Agent(self.box.database, settings, link, functions, name=NAME, clock=lambda: self.now)
        return self.agent

    def add_box(self, name: str) -> str:
        """One more box, which has called just now. Returns its id."""
        box = add_box(self.head.database, name, f"home-of-{name}", head=self.head.node)
        with self.head.database.write() as session:
            BoxRepository(session).set(
                box.id,
                facts=make_facts(link_host="127.0.0.1").model_dump(mode="json"),
                capacity=make_capacity().model_dump(mode="json"),
            )
        return box.id

    def go_on(self, is_so: Any) -> None:
        """Lets both boxes work until something is so."""

        def look() -> bool:
            self.head.now += 1
            self.box.now += 1
            self.head.tick()
            return bool(is_so())

        self.until(look)

    def divide(self, **windlass: Any) -> str:
        """A job whose plan over both boxes was made."""
        job_id = self.prepare(boxes=2, **windlass)
        self.head.tick()
        self.head.stage_planners[-1].answer = PLAN
        self.head.tick()
        return job_id

    def run(self) -> str:
        """A job of which both boxes serve the first attempt."""
        job_id = self.divide()
        self.go_on(lambda: self.box.runners.alive)
        return job_id

    def forget_division(self, job_id: str, hyperparameters: Any) -> None:
        """Makes the head one that was restored from a backup that is older than the job's division."""
        (self.head.settings.jobs_dir / job_id / "prepare" / "stages.json").unlink()
        with self.head.database.write() as session:
            PartRepository(session).remove(job_id)
            values = {"attempt": 0, "num_lost": 0, "hyperparameters": hyperparameters}
            session.execute(update(Job).where(Job.id == job_id).values(**values))
        self.agent.tick()

    def begin(self, job_id: str) -> None:
        """Lets the first attempt begin: all boxes are connected."""
        journal = self.head.journal(job_id, 1)
        journal.append("message", "Loading the model's weights into the tensor store")
        journal.close()
        self.head.tick()

    def divide_beside(self, other: str) -> str:
        """A part whose attempt is wanted on the box, though another job runs there."""
        job_id = self.prepare(boxes=2)
        with self.box.database.write() as session:
            parts = PartRepository(session)
            parts.add(job_id, self.box.node, position=1, state=PartState.READY)
            parts.want(job_id, self.box.node, attempt=1, link={}, is_over=False)
        return job_id

    def part(self, job_id: str, stage: Stage | None = None) -> JobPart | None:
        """The box's part of a job, as the head knows it, or as the box does."""
        with (stage or self.head).database.read() as session:
            return PartRepository(session).find(job_id, self.box.node)

    def state(self, job_id: str) -> str | None:
        part = self.part(job_id)
        return None if part is None else part.state

    def end_attempt(self, job_id: str, status: str, **error: Any) -> None:
        """Ends the attempt on both boxes, as runners do."""
        attempt = self.head.job(job_id).attempt
        journal = self.head.journal(job_id, attempt)
        journal.append_outcome(status, "over", **error)
        journal.close()
        self.head.end_runner(job_id, attempt)
        self.box.end_runner(job_id, attempt)


@pytest.fixture
def spread(tmp_path: Path, databases: tuple[Database, Database]) -> Iterator[Spread]:
    spread = Spread(tmp_path, *databases)
    yield spread
    spread.head.dispatcher._spread.close()
    spread.close()


def test_job_is_planned_over_its_boxes_and_each_gets_its_part(spread: Spread) -> None:
    job_id = spread.prepare(boxes=2)
    spread.head.tick()
    [planner] = spread.head.stage_planners
    assert [box.name for box in planner.request.boxes] == ["head", NAME]
    assert spread.head.job(job_id).waiting_reason == f"its plan over the boxes head, {NAME} is being made"
    planner.answer = PLAN
    spread.head.tick()
    assert spread.state(job_id) == "copying"
    assert spread.head.job(job_id).hyperparameters["num_microbatches"] == 2
    events = spread.head.messages(job_id)
    assert f"Divided over 2 boxes: box head: blocks 0 to 1; box {NAME}: blocks 2 to 3" in events
    assert spread.head.status(job_id) is JobStatus.QUEUED, "it waits until all boxes have its files"
    spread.go_on(lambda: spread.state(job_id) == "ready")
    folder = spread.box.settings.jobs_dir / job_id
    assert (folder / "prepare" / "stages.json").exists()
    assert (folder / "dataset" / "tokens.bin").stat().st_size == 256 * 5000


def test_simulated_step_of_a_division_is_kept_beside_it(spread: Spread) -> None:
    job_id = spread.prepare(boxes=2)
    spread.head.tick()
    folder = spread.head.settings.jobs_dir / job_id / "prepare"
    (folder / "stages.partial" / "simulated").mkdir(parents=True)
    (folder / "stages.partial" / "simulated" / "step-4.json").write_text("{}")
    spread.head.stage_planners[-1].answer = PLAN
    spread.head.tick()
    assert spread.state(job_id) == "copying"
    assert (folder / "simulated" / "step-4.json").exists()
    assert not (folder / "stages.partial").exists()


def test_attempt_that_a_box_never_heard_of_is_not_begun_later(spread: Spread) -> None:
    job_id = spread.divide()
    spread.go_on(lambda: spread.head.runners.alive)
    spread.head.end_runner(job_id, 1)
    spread.head.tick()
    spread.go_on(lambda: spread.head.job(job_id).attempt == 2)
    spread.go_on(lambda: spread.box.runners.alive)
    assert [spec.attempt for spec in spread.box.runners.started] == [2]


def test_all_boxes_serve_an_attempt_and_reach_each_other(spread: Spread) -> None:
    job_id = spread.run()
    [head], [box] = spread.head.runners.links, spread.box.runners.links
    assert head.names == box.names
    first, second = head.names
    assert head.secret == box.secret
    assert len(head.secret) == 32
    assert (box.addresses, head.addresses) == ({first: head.address}, {second: box.address})
    assert [(spec.job, spec.attempt, spec.box) for spec in spread.head.runners.started] == [(job_id, 1, 0)]
    assert [(spec.job, spec.attempt, spec.box) for spec in spread.box.runners.started] == [(job_id, 1, 1)]
    assert spread.box.runners.started[0].job_dir == str(spread.box.settings.jobs_dir / job_id)
    spread.go_on(lambda: spread.state(job_id) == "running")


def test_ended_job_leaves_nothing_on_any_box(spread: Spread) -> None:
    job_id = spread.run()
    spread.head.export_model()
    spread.end_attempt(job_id, "succeeded", trained_tokens=7)
    spread.go_on(lambda: spread.part(job_id) is None)
    assert spread.head.status(job_id) is JobStatus.SUCCEEDED
    assert spread.part(job_id, spread.box) is None
    assert not (spread.box.settings.jobs_dir / job_id).exists()
    assert list(taken_dir(spread.box.settings.home).glob("*.json")) == []
    assert spread.box.dispatcher._parts.hold is None


def test_lost_attempt_is_followed_by_another_once_all_boxes_have_ended_theirs(spread: Spread) -> None:
    job_id = spread.run()
    spread.begin(job_id)
    spread.go_on(lambda: spread.state(job_id) == "running")
    spread.head.end_runner(job_id, 1)  # without an outcome
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.QUEUED)
    spread.head.now += 300
    spread.head.tick()
    assert spread.head.job(job_id).attempt == 1
    assert spread.head.job(job_id).waiting_reason == f"the processes of attempt 1 have not ended yet on box {NAME}"
    spread.box.end_runner(job_id, 1)
    spread.go_on(lambda: len(spread.box.runners.started) == 2)
    assert spread.box.runners.started[-1].attempt == spread.head.runners.started[-1].attempt == 2
    first, second = spread.box.runners.links
    assert first.secret != second.secret


def test_part_that_outlives_its_attempt_is_killed(spread: Spread) -> None:
    job_id = spread.run()
    spread.begin(job_id)
    spread.head.end_runner(job_id, 1)
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.QUEUED)
    spread.go_on(lambda: spread.part(job_id, spread.box).attempt != 1)  # type: ignore[union-attr]
    spread.box.tick()
    assert spread.box.runners.alive, "it may end by itself"
    spread.box.now += 200
    spread.box.tick()
    assert not spread.box.runners.alive


def test_part_that_cannot_start_says_why(spread: Spread) -> None:
    spread.box.runners.refusal = ValueError("the arena cannot be made")
    job_id = spread.divide()
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.RUNNING)
    spread.go_on(lambda: (spread.part(job_id) or JobPart()).told == "the arena cannot be made")
    assert spread.head.messages(job_id).count(f"Box {NAME}: the arena cannot be made") == 1
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.QUEUED)
    assert not spread.head.runners.alive
    told = f"Attempt 1 was lost: box {NAME} could not begin its part of it: the arena cannot be made"
    assert any(message.startswith(told) for message in spread.head.messages(job_id))


@pytest.mark.long
def test_attempt_ends_at_once_when_a_part_ends_before_all_are_connected(spread: Spread) -> None:
    job_id = spread.run()
    append_error(spread.box.settings.jobs_dir / job_id, Attempt(1), "Traceback\nValueError: no such SSD")
    spread.box.end_runner(job_id, 1)
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.QUEUED)
    told = f"Attempt 1 was lost: box {NAME} could not begin its part of it: ValueError: no such SSD"
    assert any(message.startswith(told) for message in spread.head.messages(job_id))


def test_part_whose_attempt_never_began_is_killed_at_once(spread: Spread) -> None:
    job_id = spread.run()
    spread.head.end_runner(job_id, 1)
    spread.until(lambda: spread.head.tick() or not spread.box.runners.alive, most=5)


def test_part_that_ends_after_all_were_connected_leaves_the_end_to_the_runners(spread: Spread) -> None:
    job_id = spread.run()
    spread.begin(job_id)
    spread.box.end_runner(job_id, 1)
    spread.go_on(lambda: (spread.part(job_id) or JobPart()).served == 1 and spread.state(job_id) == "ready")
    spread.head.tick(2)
    assert spread.head.runners.alive


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


@pytest.mark.long
def test_job_cancelled_before_its_first_attempt_is_removed_from_its_boxes(spread: Spread) -> None:
    job_id = spread.divide()
    spread.go_on(lambda: spread.state(job_id) == "copying" and spread.part(job_id, spread.box) is not None)
    with spread.head.database.write() as session:
        MirrorRepository(session).request(Instruction.CANCEL, job_id, here=spread.head.node)
    spread.go_on(lambda: spread.part(job_id) is None)
    assert spread.head.status(job_id) is JobStatus.CANCELLED
    assert not (spread.box.settings.jobs_dir / job_id).exists()


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


def test_agent_and_dispatchers_that_are_killed_go_on(spread: Spread) -> None:
    job_id = spread.divide()
    for _ in range(30):
        spread.agent.tick()
        for transfer in list(spread.agent._takings._transfers.values()):
            assert transfer.task is not None
            transfer.task.result(timeout=20)
            spread.agent.tick()
        spread.agent.close()
        spread.new_agent()
        spread.box.new_dispatcher().tick()
        spread.head.dispatcher._spread.close()  # the sockets of a killed process are closed
        spread.head.new_dispatcher().tick()
        spread.now += 1
        if spread.box.runners.alive:
            break
    assert spread.box.runners.alive == spread.head.runners.alive == {(job_id, 1)}


@pytest.mark.long
def test_box_that_has_lost_its_home_says_so(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready")
    spread.agent._takings.forget(job_id)
    with spread.box.database.write() as session:
        PartRepository(session).remove(job_id)
    spread.go_on(lambda: spread.state(job_id) == "lost")
    spread.head.now += 300
    spread.head.tick(2)
    assert "has lost its part" in (spread.head.job(job_id).waiting_reason or "")
    later = spread.prepare(box="head")
    spread.go_on(lambda: spread.head.status(later) is JobStatus.RUNNING)


def test_job_that_is_cancelled_while_it_is_planned_does_not_keep_others_from_it(spread: Spread) -> None:
    first, second = spread.prepare(boxes=2), spread.prepare(boxes=2)
    spread.head.tick()
    with spread.head.database.write() as session:
        MirrorRepository(session).request(Instruction.CANCEL, first, here=spread.head.node)
    spread.head.tick()
    assert [planner.stopped for planner in spread.head.stage_planners] == [True, False]
    spread.head.stage_planners[-1].answer = PLAN
    spread.head.tick()
    assert spread.state(second) == "copying"


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


def test_part_that_is_to_be_removed_begins_no_attempt(spread: Spread) -> None:
    job_id = spread.divide()
    spread.go_on(lambda: spread.state(job_id) == "ready")
    with spread.box.database.write() as session:
        parts = PartRepository(session)
        parts.want(job_id, spread.box.node, attempt=1, link={}, is_over=True)
        assert not parts.begin(job_id, spread.box.node, 1)
    assert not spread.box.runners.alive


def test_head_whose_database_is_older_than_the_division_does_not_make_boxes_remove_states(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: (spread.part(job_id) or JobPart()).served == 1 and spread.state(job_id) == "ready")
    with spread.head.database.write() as session:
        PartRepository(session).remove(job_id)
    for _ in range(3):
        spread.agent.tick()
    part = spread.part(job_id)
    assert part is not None
    assert (part.position, part.state) == (1, "ready")
    assert part.served > 0
    assert spread.part(job_id, spread.box) is not None


def test_box_that_has_served_more_attempts_than_the_head_knows_serves_the_next(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    with spread.box.database.write() as session:
        session.execute(update(JobPart).values(served=5))
    spread.head.tick()
    spread.head.now += 300
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.RUNNING)
    assert spread.head.job(job_id).attempt == 6


def test_part_does_not_begin_beside_processes_of_another_job(spread: Spread) -> None:
    other = spread.prepare(box=NAME)
    spread.go_on(lambda: spread.head.status(other) is JobStatus.RUNNING)
    job_id = spread.divide_beside(other)
    spread.box.dispatcher._parts.tick()
    assert {job for job, _ in spread.box.runners.alive} == {other}
    assert spread.part(job_id, spread.box).served == 0  # type: ignore[union-attr]


def test_part_that_was_planned_anew_begins_with_the_new_plan(spread: Spread) -> None:
    job_id = spread.divide()
    spread.until(lambda: spread.state(job_id) == "ready")
    changed = replace(PLAN, step_s=3.0)
    keep_stages(spread.head.settings, job_id, changed)
    spread.agent.tick()
    assert spread.state(job_id) == "copying", "what the box has is not what it is to have"
    spread.go_on(lambda: spread.box.runners.alive)
    assert stages_of(spread.box.settings, job_id) == changed


def test_box_that_leaves_keeps_nothing_of_its_parts(spread: Spread) -> None:
    job_id = spread.run()
    spread.head.end_runner(job_id, 1)
    spread.box.end_runner(job_id, 1)
    assert discard_parts(spread.box.database, spread.box.settings) == []
    assert spread.part(job_id, spread.box) is None
    assert list(spread.box.settings.home.rglob(f"{job_id}*")) == []


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


def test_part_of_a_plan_with_fewer_fields_is_not_lost_when_a_restored_head_takes_it(spread: Spread) -> None:
    before = spread.head.job(job_id := spread.prepare(boxes=2)).hyperparameters
    spread.head.tick()
    spread.head.stage_planners[-1].answer = PLAN
    spread.go_on(lambda: spread.box.runners.alive)
    for stage in (spread.head, spread.box):  # as an older release has written it
        path = stage.settings.jobs_dir / job_id / "prepare" / "stages.json"
        values = json.loads(path.read_text())
        del values["layout_epoch"]
        path.write_text(json.dumps(values))
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready" and spread.head.status(job_id) is JobStatus.QUEUED)
    spread.forget_division(job_id, before)
    spread.go_on(lambda: spread.head.runners.alive)
    assert spread.head.job(job_id).attempt == 2
    assert stages_digest(spread.head.settings, job_id) == stages_digest(spread.box.settings, job_id)


def test_head_that_is_older_than_the_division_takes_it_from_its_boxes(spread: Spread) -> None:
    before = spread.head.job(job_id := spread.prepare(boxes=2)).hyperparameters
    spread.head.tick()
    spread.head.stage_planners[-1].answer = replace(PLAN, num_microbatches=1)
    spread.go_on(lambda: spread.box.runners.alive)
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready" and spread.head.status(job_id) is JobStatus.QUEUED)
    spread.forget_division(job_id, before)
    spread.go_on(lambda: spread.head.runners.alive)
    assert spread.head.job(job_id).attempt == 2
    assert spread.head.job(job_id).hyperparameters["num_microbatches"] == 1
    assert stages_of(spread.head.settings, job_id) == stages_of(spread.box.settings, job_id)
    assert any("the division that its boxes have" in message for message in spread.head.messages(job_id))


@pytest.mark.long
def test_part_of_another_division_is_not_used(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready")
    keep_stages(spread.head.settings, job_id, replace(PLAN, step_s=3.0))
    spread.go_on(lambda: spread.state(job_id) == "lost")
    spread.head.now += 300
    spread.head.tick(2)
    reason = spread.head.job(job_id).waiting_reason or ""
    assert f"box {NAME} has a part of another division of the job; `windlass restart`" in reason


def test_box_keeps_its_part_of_a_job_that_a_restored_head_does_not_know(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready" and spread.head.status(job_id) is JobStatus.QUEUED)
    with spread.head.database.write() as session:
        PartRepository(session).remove(job_id)
        session.execute(delete(Job).where(Job.id == job_id))
    for _ in range(4):
        spread.agent.tick()
    part = spread.part(job_id, spread.box)
    assert part is not None
    assert part.attempt == 0
    assert (spread.box.settings.jobs_dir / job_id).is_dir()


def test_part_on_a_box_of_the_version_before_is_not_called_lost(
    spread: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready" and spread.head.status(job_id) is JobStatus.QUEUED)
    to_json = SyncRequest.model_dump_json

    def without_plans(request: SyncRequest) -> str:
        as_json = json.loads(to_json(request))
        for told in as_json["parts"].values():
            del told["plan"]
            del told["division"]
        return json.dumps(as_json)

    monkeypatch.setattr(SyncRequest, "model_dump_json", without_plans)
    for _ in range(3):
        spread.agent.tick()
    assert spread.state(job_id) in ("ready", "running")


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
