"""A queue over several boxes: jobs that are given to other boxes, wait for them, and are taken back."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from tests.support.service.dispatcher_stage import PREPARED, Stage, planned
from windlass.amounts import GIB
from windlass.planner.hardware.hardware import Gpus, Hardware, Host, Pcie, Ssds
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.report import PlanReport
from windlass.service.dispatcher.placement.capacity import MachineCapacity
from windlass.service.dispatcher.placement.fleet import kind_of
from windlass.service.installation.restored import mark_restored, was_restored
from windlass.service.jobs.box_plans import keep_numbers, kind_dir
from windlass.service.jobs.plan_files import load_plan
from windlass.service.machine.fleet.facts import BoxFacts, GpuFacts
from windlass.service.machine.fleet.messages import CapacityReport
from windlass.service.preparation.pipeline import PreparationError
from windlass.service.preparation.steps import PLAN_JOB
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Box, Job
from windlass.storage.sql.repositories.boxes import BoxRepository, BoxState, Instruction
from windlass.storage.sql.repositories.events import EventRepository

MACHINE = Hardware(
    gpus=Gpus(count=1, memory_gib=2.0, tflops=20),
    host=Host(memory_gib=6.0, memory_gb_per_s=40, adam_params_per_s=1e9),
    pcie=Pcie(h2d_gb_per_s=12, d2h_gb_per_s=12),
    ssds=Ssds(count=2, read_gb_per_s=8, write_gb_per_s=8, capacity_gib=100),
)
HARDWARE = MACHINE.model_dump(mode="json")


@pytest.fixture
def stage(tmp_path: Path, database: Database) -> Stage:
    stage = Stage(tmp_path / "home", database, num_gpus=1)
    stage.box = MachineCapacity(host_nbytes=10 * GIB, room_nbytes=10 * GIB)
    return stage


def facts(*, num_gpus: int = 1, is_measured: bool = False) -> BoxFacts:
    return BoxFacts(
        windlass="1",
        python="3",
        torch="2",
        ray="2",
        num_cores=8,
        num_gpus=num_gpus,
        gpus=tuple(GpuFacts(name="card", memory_nbytes=GIB) for _ in range(num_gpus)),
        memory_nbytes=64 * GIB,
        hardware=HARDWARE if is_measured else None,
    )


def join(stage: Stage, name: str, *, memory_gib: int = 10, **more: Any) -> Box:
    """A box that joins and says what is free on it."""
    told = facts(**more)
    capacity = CapacityReport(num_devices=told.num_gpus, host_nbytes=memory_gib * GIB, room_nbytes=memory_gib * GIB)
    with stage.database.write() as session:
        boxes = BoxRepository(session)
        box = boxes.add(
            name=name,
            node=f"node-{name}",
            head=stage.node,
            certificate=name,
            address="",
            facts=told.model_dump(mode="json"),
        )
        boxes.set(box.id, capacity=capacity.model_dump(mode="json"))
        return boxes.get(box.id)


def leave(stage: Stage, box: Box, **values: Any) -> None:
    with stage.database.write() as session:
        BoxRepository(session).set(box.id, **(values or {"seen_at": time.time() - 60}))


def place_of(stage: Stage, job_id: str) -> str | None:
    """The box of a job."""
    with stage.database.read() as session:
        box = BoxRepository(session).by_node(stage.job(job_id).node)
    return None if box is None else box.name


def instructions(stage: Stage, box: Box) -> list[tuple[str, str]]:
    with stage.database.read() as session:
        return [(each.kind, each.job_id) for each in BoxRepository(session).instructions(box.id)]


def ask_for(stage: Stage, job_id: str, **windlass: Any) -> None:
    values = {**stage.job(job_id).windlass, **windlass}
    with stage.database.write() as session:
        session.execute(update(Job).where(Job.id == job_id).values(windlass=values))


def answer(*, step_s: float = 1.0, feasible: bool = True, host_gib: float = 1.0) -> dict[str, Any]:
    peaks = {"gpu": 0.0, "host": host_gib, "ssd": 0.0}
    reasons = () if feasible else ("it needs 90.0 GiB of host memory, and 64.0 GiB are there",)
    report = PlanReport(
        feasible=feasible,
        reasons=reasons,
        step_s=step_s,
        peak_gib=peaks,
        missing_bytes=None if feasible else {"host": 26 * GIB},
    )
    plan = (
        JobPlan(report=report, arena_nbytes=0) if not feasible else JobPlan.model_validate(planned(host_gib)[PLAN_JOB])
    )
    return {"ok": True, **plan.model_copy(update={"report": report}).to_json()}


def keep_answer(stage: Stage, job_id: str, told: BoxFacts, values: Mapping[str, Any]) -> None:
    """Stores a plan for a kind of box as the preparation does."""
    key = kind_of(told).key
    folder = kind_dir(stage.settings, job_id, key)
    folder.mkdir(parents=True)
    (folder / f"{PLAN_JOB}.json").write_text(json.dumps(values))
    keep_numbers(stage.settings, job_id, {key: values})


def test_jobs_begin_on_all_boxes_and_the_rest_waits_with_a_reason_that_names_them(stage: Stage) -> None:
    attic = join(stage, "attic")
    jobs = [stage.queue_only(prepared=planned(1.0)) for _ in range(3)]
    stage.tick()
    assert [place_of(stage, job_id) for job_id in jobs] == [None, "attic", None]
    assert [stage.status(job_id) for job_id in jobs] == [JobStatus.RUNNING, JobStatus.QUEUED, JobStatus.QUEUED]
    given = stage.job(jobs[1])
    assert (given.lease_holder, given.waiting_reason) == (None, "is being copied to box attic")
    assert instructions(stage, attic) == [(Instruction.TAKE, jobs[1])]
    assert stage.job(jobs[2]).waiting_reason == (
        f"every GPU of box head is in use by job {jobs[0]}; every GPU of box attic is in use by job {jobs[1]}"
    )
    stage.tick(3)
    assert instructions(stage, attic) == [(Instruction.TAKE, jobs[1])], "once"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"state": BoxState.DRAINING.value}, "box attic is draining"),
        ({"seen_at": 0.0}, f"box attic is away since {time.strftime('%Y-%m-%d %H:%M', time.localtime(0.0))}"),
        ({"capacity": None}, "box attic has not yet said what is free on it"),
    ],
)
def test_box_that_is_not_open_gets_nothing(stage: Stage, values: dict[str, Any], reason: str) -> None:
    attic = join(stage, "attic")
    leave(stage, attic, **values)
    first, second = (stage.queue_only(prepared=planned(1.0)) for _ in range(2))
    stage.tick()
    assert [place_of(stage, job_id) for job_id in (first, second)] == [None, None]
    assert stage.job(second).waiting_reason == f"every GPU of box head is in use by job {first}; {reason}"


def test_job_waits_for_the_box_that_it_asks_for(stage: Stage) -> None:
    attic = join(stage, "attic")
    first, second = (stage.queue_only(prepared=planned(1.0)) for _ in range(2))
    for job_id in (first, second):
        ask_for(stage, job_id, box="attic")
    on_head = stage.queue_only(prepared=planned(1.0))
    ask_for(stage, on_head, box="head")
    stage.tick()
    assert [place_of(stage, job_id) for job_id in (first, second, on_head)] == ["attic", None, None]
    assert stage.status(on_head) is JobStatus.RUNNING
    assert stage.job(second).waiting_reason == f"every GPU of box attic is in use by job {first}"
    leave(stage, attic, state=BoxState.REMOVED.value)
    stage.tick()
    assert stage.status(second) is JobStatus.QUEUED
    assert stage.job(second).waiting_reason == "box attic, which it asks for, has left"


def test_job_goes_where_its_plan_ends_first_with_the_plan_of_that_box(stage: Stage) -> None:
    job_id = stage.queue_only(prepared=planned(1.0))
    told = facts(is_measured=True)
    keep_answer(stage, job_id, told, answer(step_s=0.5))
    join(stage, "attic", is_measured=True)
    stage.tick()
    assert place_of(stage, job_id) == "attic"
    plan = load_plan(stage.settings, stage.job(job_id))
    assert plan is not None
    assert plan.report.step_s == 0.5


def test_job_begins_on_the_head_if_that_ends_first_or_the_other_plan_does_not_fit(stage: Stage) -> None:
    told = facts(is_measured=True)
    join(stage, "attic", is_measured=True)
    slower, too_large = stage.queue_only(prepared=planned(1.0)), stage.queue_only(prepared=planned(1.0))
    keep_answer(stage, slower, told, answer(step_s=2.0))
    keep_answer(stage, too_large, told, answer(feasible=False))
    stage.tick()
    assert [stage.status(job_id) for job_id in (slower, too_large)] == [JobStatus.RUNNING, JobStatus.QUEUED]
    assert stage.job(too_large).waiting_reason == (
        f"every GPU of box head is in use by job {slower}; "
        "it does not fit box attic: it needs 90.0 GiB of host memory, and 64.0 GiB are there"
    )


def test_plan_for_a_box_that_joins_later_is_made_while_the_job_waits(stage: Stage) -> None:
    first, second = stage.queue_only(prepared=planned(1.0)), stage.queue_only(prepared=planned(1.0))
    stage.tick()
    join(stage, "attic", is_measured=True)
    stage.tick(2)
    assert stage.job(second).waiting_reason == (
        f"every GPU of box head is in use by job {first}; its plan for box attic is being made"
    )
    [planner] = stage.planners
    assert planner.request.hardware == MACHINE
    assert not planner.request.may_measure
    planner.work_dir.mkdir(parents=True)
    (planner.work_dir / f"{PLAN_JOB}.json").write_text(json.dumps(answer(step_s=1.5)))
    planner.answer = answer(step_s=1.5)
    stage.tick(2)
    assert place_of(stage, second) == "attic"
    plan = load_plan(stage.settings, stage.job(second))
    assert plan is not None
    assert plan.report.step_s == 1.5


def test_job_waits_for_the_busy_box_on_which_it_ends_sooner(stage: Stage) -> None:
    join(stage, "attic", is_measured=True)
    first, second = (stage.queue_only(prepared=planned(1.0)) for _ in range(2))
    for job_id in (first, second):
        keep_answer(stage, job_id, facts(is_measured=True), answer(step_s=9.0))
    stage.tick()
    assert (stage.status(first), place_of(stage, second)) == (JobStatus.RUNNING, None)
    assert stage.job(second).waiting_reason == (
        "it would end on box head sooner than on box attic, though it has to wait there; "
        f"every GPU of box head is in use by job {first}"
    )


def test_job_that_its_box_did_not_take_before_it_was_away_is_taken_back(stage: Stage) -> None:
    attic = join(stage, "attic")
    first, second = (stage.queue_only(prepared=planned(1.0)) for _ in range(2))
    own_plan = load_plan(stage.settings, stage.job(second))
    stage.tick()
    assert place_of(stage, second) == "attic"
    assert load_plan(stage.settings, stage.job(second)) is None, "an unmeasured box runs it without a plan"
    leave(stage, attic)
    stage.new_dispatcher()
    stage.tick(2)
    assert place_of(stage, second) == "attic", "it could not call while the head was off"
    stage.now += 16
    stage.tick(2)
    assert (place_of(stage, second), instructions(stage, attic)) == (None, [])
    assert load_plan(stage.settings, stage.job(second)) == own_plan
    stage.end_runner(first)
    leave(stage, attic, state=BoxState.REMOVED.value)
    with stage.database.write() as session:
        session.execute(update(Job).where(Job.id == first).values(status=JobStatus.CANCELLED))
    stage.tick(3)
    assert stage.status(second) is JobStatus.RUNNING


def test_job_that_its_box_has_taken_stays_there(stage: Stage) -> None:
    attic = join(stage, "attic")
    job_id = stage.queue_only(prepared=planned(1.0))
    ask_for(stage, job_id, box="attic")
    stage.tick()
    with stage.database.write() as session:
        [take] = BoxRepository(session).instructions(attic.id)
        BoxRepository(session).withdraw(take.ordinal)
    leave(stage, attic)
    stage.now += 16
    stage.tick(2)
    assert place_of(stage, job_id) == "attic"


def test_box_makes_room_for_a_job_of_higher_priority(stage: Stage) -> None:
    attic = join(stage, "attic")
    low = stage.queue_only(priority=5, prepared=planned(1.0))
    ask_for(stage, low, box="attic")
    stage.tick()
    high = stage.queue_only(priority=1, prepared=planned(1.0))
    ask_for(stage, high, box="attic")
    stage.tick()
    assert place_of(stage, high) == "attic"
    assert instructions(stage, attic) == [(Instruction.TAKE, low), (Instruction.TAKE, high)]


def test_job_that_fits_only_another_box_is_accepted(stage: Stage) -> None:
    join(stage, "attic", is_measured=True, num_gpus=2)
    key = kind_of(facts(is_measured=True, num_gpus=2)).key
    job_id = stage.submit()
    stage.tick()
    order = stage.preparations[-1].order
    assert list(order.other_plans) == [key]
    unfit = {**answer(feasible=False)}
    stage.preparations[-1].ending = {**PREPARED, PLAN_JOB: unfit, f"{PLAN_JOB}@{key}": answer()}
    stage.tick(2)
    assert place_of(stage, job_id) == "attic"


def test_job_that_fits_no_box_fails_with_the_closest_one(stage: Stage) -> None:
    join(stage, "attic", is_measured=True)
    key = kind_of(facts(is_measured=True)).key
    job_id = stage.submit()
    stage.tick()
    far = answer(feasible=False)
    far["plan"] = {**far["plan"], "missing_bytes": {"host": 90 * GIB}}
    stage.preparations[-1].ending = {**PREPARED, PLAN_JOB: far, f"{PLAN_JOB}@{key}": answer(feasible=False)}
    stage.tick(2)
    error = stage.job(job_id).error
    assert error is not None
    assert error["code"] == "does_not_fit"
    assert error["message"] == (
        "it fits no box; the closest one is attic: it needs 90.0 GiB of host memory, and 64.0 GiB are there"
    )


def test_more_gpus_than_the_head_has_are_taken_from_a_box(stage: Stage) -> None:
    join(stage, "attic", num_gpus=2)
    job_id = stage.queue_only(prepared=planned(1.0))
    ask_for(stage, job_id, gpus=2)
    stage.tick()
    assert place_of(stage, job_id) == "attic"


def test_failed_plan_for_a_box_is_told_and_not_repeated(stage: Stage) -> None:
    first, second = stage.queue_only(prepared=planned(1.0)), stage.queue_only(prepared=planned(1.0))
    join(stage, "attic", is_measured=True)
    stage.tick(2)
    stage.planners[-1].answer = PreparationError("plan_job_failed", "planning was killed")
    stage.tick(3)
    assert stage.job(second).waiting_reason == (
        f"every GPU of box head is in use by job {first}; it does not fit box attic: planning was killed"
    )
    assert len(stage.planners) == 1


def test_reason_that_changes_only_in_the_jobs_on_the_boxes_is_no_new_event(stage: Stage) -> None:
    attic = join(stage, "attic")
    jobs = [stage.queue_only(prepared=planned(1.0)) for _ in range(4)]
    stage.tick()
    with stage.database.write() as session:  # the first job on the box has ended
        boxes = BoxRepository(session)
        boxes.withdraw(boxes.instructions(attic.id)[-1].ordinal)
        session.execute(update(Job).where(Job.id == jobs[1]).values(status=JobStatus.SUCCEEDED, node=stage.node))
    stage.now += 61
    stage.tick(2)
    assert place_of(stage, jobs[2]) == "attic"
    assert f"every GPU of box attic is in use by job {jobs[2]}" in (stage.job(jobs[3]).waiting_reason or "")
    with stage.database.read() as session:
        page = EventRepository(session).page(jobs[3], limit=100, after=None, type=None)
    assert sum("Waiting: every GPU" in row.message for row in page.rows) == 1


def test_home_without_boxes_does_not_wait_after_a_restore(stage: Stage) -> None:
    mark_restored(stage.settings.home)
    job_id = stage.queue_only()
    stage.new_dispatcher()
    stage.tick()
    assert stage.status(job_id) is JobStatus.RUNNING
    assert not was_restored(stage.settings.home)
