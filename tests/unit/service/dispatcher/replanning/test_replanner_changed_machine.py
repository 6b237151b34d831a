"""Jobs whose machine was measured again before their launch."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.service.dispatcher_stage import PREPARED, Stage
from windlass.amounts import GIB
from windlass.engine.memory_plan.allocator_reserve import allocatable_nbytes, reserved_nbytes
from windlass.engine.memory_plan.plan import Placement
from windlass.planner.hardware.hardware import Hardware
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.report import PlanReport
from windlass.planner.solver.memory_limits import DRIVER_NBYTES
from windlass.service.dispatcher import replanner
from windlass.service.dispatcher.placement.capacity import MachineCapacity
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.spec_builder import job_dir, plan_request, resolve_job
from windlass.service.preparation.pipeline import PreparationError
from windlass.service.preparation.steps import CHECK_MODEL, PREPARE_DATA, QUESTION_FILE
from windlass.service.validation.hyperparameters import WindlassSettings
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.jobs import JobRepository

OLD, NEW = Placement(num_cached_params=1), Placement(host_blocks=(0, 2), num_cached_params=2)
REPORT = PlanReport(feasible=True, reasons=(), step_s=10.0)
PLANNED = {"ok": True, **JobPlan(report=REPORT, placement=OLD, arena_nbytes=1 << 20).to_json()}
ANOTHER = {"ok": True, **JobPlan(report=REPORT, placement=NEW, arena_nbytes=2 << 20).to_json()}


def machine(read_gb_per_s: float) -> Hardware:
    rates = {"write_gb_per_s": 1.0, "combined_gb_per_s": 3.0, "cpu_s_per_gb": 0.1}
    return Hardware.model_validate(
        {
            "gpus": {"count": 0, "memory_gib": 8.0, "tflops": 0.1},
            "host": {"memory_gib": 16.0, "memory_gb_per_s": 10.0, "adam_params_per_s": 1e8},
            "pcie": {"h2d_gb_per_s": 10.0, "d2h_gb_per_s": 10.0},
            "ssds": {"count": 2, "read_gb_per_s": read_gb_per_s, "capacity_gib": 100.0, **rates},
        }
    )


def store_request(stage: Stage, job_id: str, hardware: Hardware, asked: WindlassSettings | None = None) -> None:
    """Stores the request of the job's first plan."""
    job = stage.job(job_id)
    data = {"num_examples": 10, "num_validation_examples": 2, "num_targets": 60}
    training = resolve_job(job, {PREPARE_DATA: data, CHECK_MODEL: {"num_params": 1000}}).training
    request = plan_request(
        stage.settings,
        hardware,
        MachineResources(num_cores=4, num_gpus=0),
        model_dir=stage.settings.models_dir / job.model,
        asked=asked or WindlassSettings(),
        training=training,
    )
    path = job_dir(stage.settings, job_id) / "prepare" / QUESTION_FILE
    path.write_text(json.dumps(replace(request, compute_threads=4).to_json()))


class Measured:
    """The present measurement of the machine, as by `windlass doctor`."""

    def __init__(self) -> None:
        self.hardware: Hardware | None = machine(2.0)

    def __call__(self, _settings: object) -> Hardware | None:
        return self.hardware


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    made = Measured()
    monkeypatch.setattr(replanner, "measured_hardware", made)
    return made


def paused_job(stage: Stage) -> str:
    """A paused job with a plan for an SSD of 2 GB/s."""
    job_id = stage.submit()
    stage.tick()
    folder = job_dir(stage.settings, job_id) / "prepare"
    folder.mkdir(parents=True)
    (folder / "plan_job.json").write_text(json.dumps(PLANNED))
    store_request(stage, job_id, machine(2.0))
    stage.preparations[-1].ending = PREPARED
    stage.tick(2)
    assert stage.runners.started[0].placement == OLD
    stage.pause(job_id)
    return job_id


def test_a_job_goes_on_by_its_plan_where_the_machine_is_the_same(stage: Stage, measured: Measured) -> None:
    job_id = paused_job(stage)
    stage.request_resume(job_id)
    stage.tick()
    assert stage.planners == []
    assert stage.runners.started[1].placement == OLD


def test_a_job_that_is_resumed_on_another_machine_is_planned_anew(stage: Stage, measured: Measured) -> None:
    job_id = paused_job(stage)
    measured.hardware = machine(4.0)
    stage.request_resume(job_id)
    other = stage.queue()
    stage.tick()
    (planner,) = stage.planners
    assert planner.request.training.batch_size == 5
    assert planner.request.hardware == machine(4.0)
    assert stage.job(job_id).waiting_reason == (
        "its plan is made again, as the machine, the settings or the planner have changed since"
    )
    planner.answer = ANOTHER
    stage.tick(2)
    job = stage.job(job_id)
    assert (job.status, job.attempt, job.plan_number) == (JobStatus.RUNNING, 2, 1)
    assert stage.runners.started[1].placement == NEW
    assert stage.runners.started[1].host_memory_nbytes == 2 << 20
    assert "The machine was measured again: the job goes on by a new plan" in stage.messages(job_id)
    assert stage.status(other) is JobStatus.QUEUED  # it did not take the place meanwhile
    stage.pause(job_id)
    stage.request_resume(job_id)
    stage.tick()
    assert len(stage.planners) == 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (PreparationError("plan_job_timeout", "plan_job did not end within 600 s"), "plan_job did not end"),
        ({"ok": True, "plan": {"feasible": False, "reasons": ["the SSDs lack 3 GiB"]}}, "the SSDs lack 3 GiB"),
        ({"ok": True, "warnings": ["the model cannot be planned"]}, "the model cannot be planned"),
    ],
)
def test_where_there_is_no_new_plan_the_old_one_stays(stage: Stage, measured: Measured, answer: Any, why: str) -> None:
    job_id = paused_job(stage)
    measured.hardware = machine(4.0)
    stage.request_resume(job_id)
    stage.tick()
    stage.planners[0].answer = answer
    stage.tick(2)
    assert stage.runners.started[1].placement == OLD
    assert len(stage.planners) == 1
    (told,) = [message for message in stage.messages(job_id) if "the previous plan is kept" in message]
    assert why in told


def test_a_job_that_is_paused_again_before_it_has_its_plan_ends_the_planner(stage: Stage, measured: Measured) -> None:
    job_id = paused_job(stage)
    measured.hardware = machine(4.0)
    stage.request_resume(job_id)
    stage.tick()
    stage.request_pause(job_id)
    stage.tick()
    assert stage.planners[0].stopped
    assert stage.job(job_id).plan_number == 0


def test_a_dispatcher_that_is_killed_meanwhile_asks_again(stage: Stage, measured: Measured) -> None:
    job_id = paused_job(stage)
    measured.hardware = machine(4.0)
    stage.request_resume(job_id)
    stage.tick()
    stage.new_dispatcher()
    stage.tick()
    stage.planners[1].answer = ANOTHER
    stage.tick(2)
    assert (stage.status(job_id), stage.runners.started[1].placement) == (JobStatus.RUNNING, NEW)


def test_job_resumed_with_other_gpus_is_planned_for_them_and_keeps_its_settings(
    stage: Stage, measured: Measured
) -> None:
    job_id = paused_job(stage)
    with stage.database.write() as session:
        row = JobRepository(session).get(job_id)
        JobRepository(session).set_fields(job_id, seen=row, windlass={**row.windlass, "gpus": 2})
    stage._resources = replace(stage._resources, cpu_ranks=2)
    stage.new_dispatcher()
    stage.request_resume(job_id)
    stage.tick()
    (planner,) = stage.planners
    assert planner.request.num_ranks == 2
    report = replace(REPORT, choices={"gpus": 2})
    planner.answer = {"ok": True, **JobPlan(report=report, placement=NEW, arena_nbytes=2 << 20).to_json()}
    stage.tick(2)
    before, after = stage.runners.started
    assert (before.num_ranks, after.num_ranks, after.placement) == (1, 2, NEW)
    assert after.training == before.training
    assert "The job has 2 GPUs now, not 1: the job goes on by a new plan" in stage.messages(job_id)


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_job_that_is_resumed_with_another_budget_is_planned_anew(
    stage: Stage, measured: Measured, is_measured: bool
) -> None:
    job_id = paused_job(stage)
    if not is_measured:
        measured.hardware = None
    stage.settings = stage.settings.model_copy(update={"host_memory_gib": 3.0})
    stage.new_dispatcher()
    stage.request_resume(job_id)
    stage.tick()
    (planner,) = stage.planners
    assert planner.request.host_memory_nbytes == 3 << 30
    assert planner.request.hardware == machine(2.0)
    planner.answer = ANOTHER
    stage.tick(2)
    assert stage.runners.started[1].placement == NEW
    assert "The settings' budgets have changed: the job goes on by a new plan" in stage.messages(job_id)
    stage.pause(job_id)
    stage.request_resume(job_id)
    stage.tick()
    assert len(stage.planners) == 1


def planned_on_a_gpu(
    stage: Stage, device_nbytes: int, *, budget_gib: float | None = 4, gpu_gib: float = 8.0
) -> tuple[str, dict[str, Any]]:
    """Queues a job on a GPU, by default with a budget of 4 GiB. Returns it, and a new plan for it.

    `device_nbytes` are those of its plan and of the new one.
    """
    hardware, budgets = machine(2.0), {} if budget_gib is None else {"gpu_memory_gib": budget_gib}
    gpus = hardware.gpus.model_copy(update={"count": 1, "memory_gib": gpu_gib})
    hardware = hardware.model_copy(update={"gpus": gpus})
    engine_gib = {"gpu": device_nbytes / GIB, "host": 1.0, "ssd": 1.0}
    report = replace(REPORT, engine_gib=engine_gib)
    plans = [JobPlan(report=report, placement=each, arena_nbytes=1 << 20).to_json() for each in (OLD, NEW)]
    job_id = stage.submit(budgets=budgets)
    stage.tick()
    folder = job_dir(stage.settings, job_id) / "prepare"
    folder.mkdir(parents=True)
    (folder / "plan_job.json").write_text(json.dumps({"ok": True, **plans[0]}))
    store_request(stage, job_id, hardware, WindlassSettings.model_validate({"budgets": budgets}))
    stage.preparations[-1].ending = PREPARED
    stage.tick(2)
    return job_id, {"ok": True, **plans[1]}


def test_job_whose_plan_leaves_no_reserve_on_the_gpu_is_planned_anew_once(stage: Stage, measured: Measured) -> None:
    """An older release had no reserve. If the new plan has none either, the job's GPU worker refuses it."""
    measured.hardware = None
    job_id, another = planned_on_a_gpu(stage, allocatable_nbytes(4 * GIB) + 52)
    assert stage.runners.started == []
    (planner,) = stage.planners
    assert planner.request.device_memory_nbytes == 4 * GIB
    planner.answer = another
    stage.tick(2)
    assert len(stage.planners) == 1
    assert [spec.placement for spec in stage.runners.started] == [NEW]
    why = "The plan leaves too little of the GPU's memory to PyTorch's allocator: the job goes on by a new plan"
    assert why in stage.messages(job_id)


@pytest.mark.parametrize("budget_gib", [None, 100])
def test_plan_without_a_reserve_is_made_anew_also_without_a_smaller_budget(
    stage: Stage, measured: Measured, budget_gib: float | None
) -> None:
    """On a GPU of 80 GB the reserve is larger than what plans leave to the driver."""
    measured.hardware = None
    gpu_nbytes = int(79.1 * GIB)
    planned_nbytes = gpu_nbytes - DRIVER_NBYTES
    assert reserved_nbytes(planned_nbytes) > gpu_nbytes, "the GPU worker would refuse it"
    _, another = planned_on_a_gpu(stage, planned_nbytes, budget_gib=budget_gib, gpu_gib=79.1)
    assert stage.runners.started == []
    stage.planners[0].answer = another
    stage.tick(2)
    assert [spec.placement for spec in stage.runners.started] == [NEW]


def test_plan_that_leaves_the_reserve_on_the_whole_gpu_stays(stage: Stage, measured: Measured) -> None:
    measured.hardware = None
    planned_on_a_gpu(stage, allocatable_nbytes(80 * GIB - DRIVER_NBYTES), budget_gib=None, gpu_gib=80)
    assert stage.planners == []
    assert [spec.placement for spec in stage.runners.started] == [OLD]


def test_job_whose_plan_leaves_the_reserve_on_the_gpu_runs_by_it(stage: Stage, measured: Measured) -> None:
    measured.hardware = None
    planned_on_a_gpu(stage, allocatable_nbytes(4 * GIB))
    assert stage.planners == []
    assert [spec.placement for spec in stage.runners.started] == [OLD]


def test_a_job_whose_plan_does_not_fit_any_more_is_planned_anew(stage: Stage, measured: Measured) -> None:
    job_id = paused_job(stage)
    measured.hardware = machine(4.0)
    stage.box = MachineCapacity(room_nbytes=1 << 10)
    stage.request_resume(job_id)
    stage.tick()
    (planner,) = stage.planners
    planner.answer = {**ANOTHER, "arena_nbytes": 1 << 10}
    stage.tick(2)
    assert stage.runners.started[1].host_memory_nbytes == 1 << 10


def test_a_job_that_needs_a_plan_and_waits_does_not_keep_others_from_theirs(stage: Stage, measured: Measured) -> None:
    """The planner has answered, but now a job of higher priority has the device."""
    job_id = paused_job(stage)
    measured.hardware = machine(4.0)
    stage.request_resume(job_id)
    stage.tick()
    urgent = stage.queue(priority=-1)
    stage.tick()
    assert stage.status(urgent) is JobStatus.RUNNING
    stage.planners[0].answer = ANOTHER
    stage.tick(2)
    assert stage.job(job_id).plan_number == 1
    assert stage.job(job_id).waiting_reason == f"the CPU is in use by job {urgent}"


def test_a_machine_that_is_not_measured_any_more_changes_nothing(stage: Stage, measured: Measured) -> None:
    job_id = paused_job(stage)
    measured.hardware = None
    stage.request_resume(job_id)
    stage.tick()
    assert stage.runners.started[1].placement == OLD


def test_job_whose_plan_has_a_wrong_value_fails_and_says_so(stage: Stage) -> None:
    job_id = stage.submit()
    stage.tick()
    folder = job_dir(stage.settings, job_id) / "prepare"
    folder.mkdir(parents=True)
    (folder / "plan_job.json").write_text(json.dumps({**PLANNED, "placement": {"host_blocks": "all"}}))
    stage.preparations[-1].ending = PREPARED
    stage.tick(2)
    job = stage.job(job_id)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert job.error["code"] == "start_failed"
    assert "the job's plan cannot be read" in job.error["message"]
    assert "host_blocks" in job.error["message"]
