"""Jobs whose plans choose the number of GPUs, from their preparation to their attempts."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.dispatcher_stage import PREPARED, Stage
from tests.unit.service.dispatcher.replanning.test_replanner_measured_steps import train
from windlass.actors.job.journal import Journal
from windlass.actors.scheduler.scheduler import PAUSED
from windlass.amounts import GIB
from windlass.engine.memory_plan.plan import Placement
from windlass.planner.hardware.hardware import Hardware
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.report import PlanReport
from windlass.service.dispatcher import replanner
from windlass.service.dispatcher.queue import Verdict
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.plan_files import load_plan
from windlass.service.jobs.spec_builder import job_dir, plan_request, resolve_job
from windlass.service.preparation.steps import PLAN_JOB, QUESTION_FILE
from windlass.service.validation.hyperparameters import WindlassSettings
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.jobs import JobRepository

STEP_S = {1: 70.0, 2: 40.0, 4: 20.0}  # of the plans, by number of GPUs


@pytest.fixture
def four_gpus(tmp_path: Path, database: Database) -> Stage:
    return Stage(tmp_path / "home", database, num_gpus=4)


def plan_for(gpus: int, step_s: float) -> JobPlan:
    report = PlanReport(feasible=True, reasons=(), step_s=step_s, choices={"gpus": gpus}, peak_gib={"host": gpus})
    return JobPlan(report=report, placement=Placement(num_cached_params=gpus), arena_nbytes=gpus * GIB)


def planned(step_s: Mapping[int, float] = STEP_S) -> Mapping[str, dict[str, Any]]:
    """The results of a preparation with plans for these numbers; the last one is chosen."""
    *others, chosen = (plan_for(gpus, seconds) for gpus, seconds in step_s.items())
    plan = chosen.model_copy(update={"others": tuple(others)})
    return {**PREPARED, PLAN_JOB: {"ok": True, **plan.to_json()}}


def started(stage: Stage) -> list[tuple[str, int]]:
    """The jobs of all attempts and their GPUs. Each attempt's placement is that of the plan for its number."""
    for spec in stage.runners.started:
        assert spec.placement.num_cached_params in (spec.num_ranks, None)
    return [(spec.job, spec.num_ranks) for spec in stage.runners.started]


def gpus(stage: Stage, job_id: str) -> int | None:
    return (stage.job(job_id).hyperparameters or {}).get("gpus")


def running_on(stage: Stage, num_gpus: int, ends_in_s: float | None) -> str:
    job_id = stage.queue(gpus=num_gpus)
    stage.tick()
    finish = None if ends_in_s is None else time.time() + ends_in_s
    with stage.database.write() as session:
        JobRepository(session).set_fields(job_id, seen=stage.job(job_id), estimated_finish=finish)
    return job_id


def test_job_gets_the_gpus_that_its_plan_chose_and_defaults_of_the_whole_box(four_gpus: Stage) -> None:
    job_id = four_gpus.queue(gpus="auto", prepared=planned({1: 70.0, 4: 35.0, 2: 35.0}))
    assert started(four_gpus) == [(job_id, 2)]
    assert gpus(four_gpus, job_id) == 2
    assert four_gpus.job(job_id).windlass["gpus"] == "auto"
    (spec,) = four_gpus.runners.started
    assert (spec.training.lanes, spec.training.num_microbatches) == (1, 4)


def test_job_without_a_plan_gets_one_gpu(four_gpus: Stage) -> None:
    job_id = four_gpus.queue(gpus="auto")
    assert started(four_gpus) == [(job_id, 1)]
    assert four_gpus.runners.started[0].training.num_microbatches == 4


@pytest.mark.parametrize(("ends_in_s", "expected"), [(10.0, None), (10_000.0, 2), (None, 2)])
def test_job_begins_with_fewer_gpus_if_it_ends_sooner_so(
    four_gpus: Stage, ends_in_s: float | None, expected: int | None
) -> None:
    other = running_on(four_gpus, 2, ends_in_s)
    job_id = four_gpus.queue(gpus="auto", prepared=planned())
    four_gpus.tick()
    if expected is None:
        assert four_gpus.job(job_id).waiting_reason == f"needs 4 GPUs; 2 are free beside job {other}"
        assert gpus(four_gpus, job_id) == 4
        return
    assert started(four_gpus) == [(other, 2), (job_id, 2)]
    assert gpus(four_gpus, job_id) == 2
    plan = load_plan(four_gpus.settings, four_gpus.job(job_id))
    assert plan is not None
    assert (plan.num_gpus, plan.from_attempt, plan.step_s_by_gpus) == (2, 1, STEP_S)
    told = "Begins with 2 of 4 GPUs: it ends sooner so than if it waited for 4"
    assert plan.message == told
    assert told in four_gpus.messages(job_id)
    finish = four_gpus.job(job_id).estimated_finish
    assert finish is not None
    assert finish - time.time() == pytest.approx(4 * STEP_S[2], abs=5)


def test_job_with_a_fixed_number_waits_though_fewer_are_free(four_gpus: Stage) -> None:
    running_on(four_gpus, 2, None)
    job_id = four_gpus.queue(gpus=4, prepared=planned())
    four_gpus.tick()
    assert four_gpus.status(job_id) is JobStatus.QUEUED


def test_healthy_attempt_keeps_its_gpus_and_the_next_one_gets_more(four_gpus: Stage) -> None:
    other = running_on(four_gpus, 2, None)
    job_id = four_gpus.queue(gpus="auto", prepared=planned())
    four_gpus.tick()
    four_gpus.request_cancel(other)
    four_gpus.lose(other)
    four_gpus.tick(3)
    assert four_gpus.runners.paused == []
    assert started(four_gpus) == [(other, 2), (job_id, 2)]
    four_gpus.pause(job_id)
    four_gpus.request_resume(job_id)
    four_gpus.tick(2)
    assert started(four_gpus)[2:] == [(job_id, 4)]
    assert gpus(four_gpus, job_id) == 4
    assert "Goes on with 4 GPUs" in four_gpus.messages(job_id)
    first, second = (spec.training for spec in four_gpus.runners.started[1:])
    assert first == second


def test_running_job_holds_the_gpus_that_it_began_with(four_gpus: Stage) -> None:
    running_on(four_gpus, 2, None)
    job_id = four_gpus.queue(gpus="auto", prepared=planned({1: 70.0, 4: 20.0}))
    third = four_gpus.queue()
    four_gpus.tick()
    assert started(four_gpus)[1:] == [(job_id, 1), (third, 1)]


def test_dispatcher_that_lost_its_memory_knows_the_gpus_of_an_attempt(four_gpus: Stage) -> None:
    other = running_on(four_gpus, 2, None)
    job_id = four_gpus.queue(gpus="auto", prepared=planned())
    four_gpus.tick()
    four_gpus.new_dispatcher().tick()
    assert started(four_gpus) == [(other, 2), (job_id, 2)]
    waiting = four_gpus.queue()
    four_gpus.tick()
    assert four_gpus.status(waiting) is JobStatus.QUEUED


def test_memory_that_lacks_for_all_gpus_lets_a_job_begin_with_fewer(four_gpus: Stage) -> None:
    four_gpus.box = replace(four_gpus.box, host_nbytes=3 * GIB)
    job_id = four_gpus.queue(gpus="auto", prepared=planned())
    four_gpus.tick()
    assert started(four_gpus) == [(job_id, 2)]


def test_job_without_a_plan_that_is_resumed_with_more_gpus_waits_for_them(four_gpus: Stage) -> None:
    other = running_on(four_gpus, 2, None)
    job_id = four_gpus.queue(gpus=1)
    four_gpus.pause(job_id)
    with four_gpus.database.write() as session:
        JobRepository(session).request_resume(job_id, gpus=4)
    four_gpus.tick()
    assert started(four_gpus) == [(other, 2), (job_id, 1)]
    assert four_gpus.job(job_id).waiting_reason == f"needs 4 GPUs; 2 are free beside job {other}"


# --- plans made again ----------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    hardware = Hardware.model_validate(
        {
            "gpus": {"count": 4, "memory_gib": 8.0, "tflops": 0.1},
            "host": {"memory_gib": 16.0, "memory_gb_per_s": 10.0, "adam_params_per_s": 1e8},
            "pcie": {"h2d_gb_per_s": 10.0, "d2h_gb_per_s": 10.0},
            "ssds": {"count": 2, "read_gb_per_s": 2.0, "write_gb_per_s": 1.0, "capacity_gib": 100.0},
        }
    )
    monkeypatch.setattr(replanner, "measured_hardware", lambda _settings: hardware)
    return hardware


def planned_job(stage: Stage, hardware: Hardware | None, asked: int | str, step_s: Mapping[int, float] = STEP_S) -> str:
    """A paused job whose stored request is that of its preparation. `hardware`: None for a job without a request."""
    job_id = stage.queue(gpus=asked, prepared=planned(step_s))
    if hardware is not None:
        store_request(stage, hardware, job_id, asked)
    stage.pause(job_id)
    return job_id


def store_request(stage: Stage, hardware: Hardware, job_id: str, asked: int | str) -> None:
    """Stores the request of the job's preparation."""
    job, resources = stage.job(job_id), MachineResources(num_cores=4, num_gpus=4)
    training = resolve_job(job, dict(planned()), num_devices=4).training
    settings = WindlassSettings(gpus=asked)
    folder = stage.settings.models_dir / job.model
    request = plan_request(stage.settings, hardware, resources, model_dir=folder, asked=settings, training=training)
    (job_dir(stage.settings, job_id) / "prepare" / QUESTION_FILE).write_text(json.dumps(request.to_json()))


def resume(stage: Stage, job_id: str, number: int | str | None) -> None:
    with stage.database.write() as session:
        JobRepository(session).request_resume(job_id, gpus=number)
    stage.tick()


def test_job_goes_on_by_its_plans_while_nothing_has_changed(four_gpus: Stage, measured: Hardware) -> None:
    job_id = planned_job(four_gpus, measured, "auto")
    resume(four_gpus, job_id, None)
    assert four_gpus.planners == []
    assert started(four_gpus) == [(job_id, 4), (job_id, 4)]


@pytest.mark.parametrize(
    ("before", "number", "chooses", "told"),
    [
        ("auto", 2, False, "The job has 2 GPUs now, and its plan does not choose them"),
        (4, "auto", True, "The plan may choose up to 4 GPUs now"),
    ],
)
def test_job_resumed_with_a_chosen_or_a_fixed_number_is_planned_anew(
    four_gpus: Stage, measured: Hardware, before: int | str, number: int | str, chooses: bool, told: str
) -> None:
    job_id = planned_job(four_gpus, measured, before)
    resume(four_gpus, job_id, number)
    (planner,) = four_gpus.planners
    assert planner.request.chooses_ranks is chooses
    planner.answer = planned({1: 70.0, 2: 40.0})[PLAN_JOB]
    four_gpus.tick(2)
    assert started(four_gpus)[1:] == [(job_id, 2)]
    assert f"{told}: the job goes on by a new plan" in four_gpus.messages(job_id)
    assert len(four_gpus.planners) == 1


REFUSED: dict[str, Any] = {"ok": True, "plan": {"feasible": False, "reasons": ["the GPUs lack 3 GiB"]}}


def test_job_resumed_with_a_number_that_it_does_not_fit_is_paused_again_and_loses_nothing(
    four_gpus: Stage, measured: Hardware
) -> None:
    job_id = planned_job(four_gpus, measured, 4, {4: 20.0})
    four_gpus.put_states(job_id)
    resume(four_gpus, job_id, 2)
    four_gpus.planners[0].answer = REFUSED
    four_gpus.tick(3)
    job = four_gpus.job(job_id)
    assert (job.status, job.attempt, job.plan_number) == (JobStatus.PAUSED, 1, 0)
    assert four_gpus.messages(job_id)[-1] == (
        "The job has 2 GPUs now, not 4, but there is no plan for 2 GPUs: the GPUs lack 3 GiB. The job is paused, and "
        "nothing of it is lost: resume it with 4 GPUs, for which it has a plan, or with another number"
    )
    assert four_gpus.jobs_on_ssds() == [{job_id}, {job_id}]
    resume(four_gpus, job_id, None)
    assert len(four_gpus.planners) == 2, "each resume is another try"
    four_gpus.request_pause(job_id)
    resume(four_gpus, job_id, 4)
    four_gpus.tick()
    assert len(four_gpus.planners) == 2
    assert started(four_gpus) == [(job_id, 4), (job_id, 4)]


def test_job_resumed_with_a_number_that_its_plan_did_not_choose_goes_on_by_the_plan_for_it(
    four_gpus: Stage, measured: Hardware
) -> None:
    job_id = planned_job(four_gpus, measured, "auto")
    resume(four_gpus, job_id, 2)
    four_gpus.planners[0].answer = REFUSED
    four_gpus.tick(3)
    assert len(four_gpus.planners) == 1
    assert started(four_gpus) == [(job_id, 4), (job_id, 2)]


def test_job_resumed_with_yet_another_number_while_it_is_planned_is_planned_for_that(
    four_gpus: Stage, measured: Hardware
) -> None:
    job_id = planned_job(four_gpus, measured, 4, {4: 20.0})
    resume(four_gpus, job_id, 2)
    four_gpus.planners[0].answer = REFUSED
    four_gpus.request_pause(job_id)
    resume(four_gpus, job_id, 3)
    four_gpus.tick()
    assert four_gpus.status(job_id) is JobStatus.QUEUED
    assert [planner.request.num_ranks for planner in four_gpus.planners] == [2, 3]
    assert four_gpus.planners[0].stopped


@pytest.mark.parametrize("number", [2, 3])
def test_job_that_cannot_be_planned_again_is_never_launched_by_a_plan_for_another_number(
    four_gpus: Stage, number: int
) -> None:
    job_id = planned_job(four_gpus, None, "auto")
    resume(four_gpus, job_id, number)
    if number in STEP_S:
        assert started(four_gpus) == [(job_id, 4), (job_id, number)]
        return
    assert started(four_gpus) == [(job_id, 4)]
    assert four_gpus.status(job_id) is JobStatus.PAUSED
    assert four_gpus.messages(job_id)[-1] == (
        "There is no plan for 3 GPUs. The job is paused, and nothing of it is lost: resume it with 1, 2 or 4 GPUs, for "
        "which it has a plan, or with another number"
    )


def test_job_resumed_with_another_number_just_before_its_launch_is_not_launched_by_the_plan_before(
    four_gpus: Stage, measured: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, queue = planned_job(four_gpus, measured, 4, {4: 20.0}), four_gpus.dispatcher._queue
    verdicts = queue.verdicts

    def too_late(*arguments: Any) -> Sequence[Verdict]:
        decided = verdicts(*arguments)
        four_gpus.request_pause(job_id)
        with four_gpus.database.write() as session:
            JobRepository(session).request_resume(job_id, gpus=2)
        return decided

    monkeypatch.setattr(queue, "verdicts", too_late)
    resume(four_gpus, job_id, None)
    assert started(four_gpus) == [(job_id, 4)]
    monkeypatch.undo()
    assert four_gpus.status(job_id) is JobStatus.QUEUED


def test_plans_made_again_may_choose_another_number(four_gpus: Stage, measured: Hardware) -> None:
    job_id = planned_job(four_gpus, measured, "auto")
    replanner.measured_hardware = lambda _settings: measured.model_copy(  # type: ignore[assignment]
        update={"host": measured.host.model_copy(update={"memory_gib": 8.0})}
    )
    resume(four_gpus, job_id, None)
    four_gpus.planners[0].answer = planned({1: 70.0, 4: 69.9, 2: 60.0})[PLAN_JOB]
    four_gpus.tick(2)
    assert gpus(four_gpus, job_id) == 2
    assert started(four_gpus)[1:] == [(job_id, 2)]
    assert len(four_gpus.planners) == 1


def correcting(stage: Stage, hardware: Hardware) -> tuple[str, Journal]:
    """A job that began with two of four GPUs, because another one has two. Its first steps are measured."""
    running_on(stage, 2, None)
    job_id = stage.queue(gpus="auto", epochs=20, prepared=planned())
    store_request(stage, hardware, job_id, "auto")
    stage.tick()
    journal = stage.journal(job_id, 1)
    train(stage, journal, 1, 2, 3, 4, 5)
    return job_id, journal


def answer(*, changes: bool) -> dict[str, Any]:
    """The planner's plans by the measured steps of a job with two GPUs."""
    plan = JobPlan.model_validate(planned({4: 25.0, 1: 80.0, 2: 50.0})[PLAN_JOB])
    return {"ok": True, **plan.model_copy(update={"changes": changes, "message": "Measured"}).to_json()}


def test_plan_of_a_job_that_began_with_fewer_gpus_is_corrected_once(four_gpus: Stage, measured: Hardware) -> None:
    job_id, journal = correcting(four_gpus, measured)
    (planner,) = four_gpus.planners
    assert planner.request.running is not None
    assert planner.request.running.plan.num_gpus == 2
    planner.answer = answer(changes=False)
    four_gpus.tick()
    assert four_gpus.messages(job_id)[-1] == "Measured"
    train(four_gpus, journal, 6, 7)
    assert len(four_gpus.planners) == 1


def test_corrected_plan_for_another_number_that_fails_makes_room_for_the_plan_before(
    four_gpus: Stage, measured: Hardware
) -> None:
    job_id, journal = correcting(four_gpus, measured)
    four_gpus.planners[0].answer = answer(changes=True)
    four_gpus.tick(2)
    other = four_gpus.runners.started[0].job
    four_gpus.request_cancel(other)
    four_gpus.lose(other)
    journal.append_outcome(PAUSED, "The attempt ended after a commit")
    journal.close()
    four_gpus.tick()
    four_gpus.end_runner(job_id)
    four_gpus.tick(2)
    assert started(four_gpus)[1:] == [(job_id, 2), (job_id, 4)]
    second = four_gpus.journal(job_id, 2)
    second.append_outcome("failed", "no room", {"code": "start_failed", "message": "no room", "param": None})
    second.close()
    four_gpus.end_runner(job_id, 2)
    four_gpus.tick(2)
    assert four_gpus.status(job_id) is JobStatus.RUNNING
    plan = load_plan(four_gpus.settings, four_gpus.job(job_id))
    assert plan is not None
    assert plan.step_s_by_gpus == STEP_S
    assert not plan.corrected
    again = four_gpus.journal(job_id, 3)
    train(four_gpus, again, 6, 7, 8, 9, 10)
    assert len(four_gpus.planners) == 1
