"""The plan of a job: over HTTP, beside what was measured, and in the dispatcher."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of
from tests.support.service.dispatcher_stage import PREPARED, Stage
from tests.unit.service.api.routes.test_plans import MACHINE
from windlass.actors.job.journal import METRICS, JournalRecord
from windlass.actors.job.pace import Pace
from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.memory_levels import Level
from windlass.actors.timeline.span_files import SIMULATED_FOLDER, StepSpans, keep_step
from windlass.amounts import GIB
from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.training_config.training_config import Optimizer
from windlass.planner.planning import job_planning as plan_job
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.plan_request import PlanRequest
from windlass.service.cli import jobs as cli_jobs
from windlass.service.cli import plan as cli_plan
from windlass.service.cli.arguments import ids as cli_ids
from windlass.service.cli.errors import CommandError
from windlass.service.installation.client import ServiceClient
from windlass.service.installation.settings import HARDWARE_FILE, SETTINGS_FILE, Settings
from windlass.service.jobs import plan_files as job_plans
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.plan_files import expected_pace
from windlass.service.jobs.plan_view import in_words, view_of
from windlass.service.jobs.spec_builder import job_dir
from windlass.service.preparation.steps import Results
from windlass.service.processes import shutdown
from windlass.storage.ids import Precision
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import JobMetrics
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.journal_import import import_journal

PLAN: dict[str, Any] = {
    "feasible": True,
    "reasons": ["a step is bound by the SSDs"],
    "step_s": 3.0,
    "engine_gib": {"gpu": 2.0, "host": 4.0, "ssd": 8.0},
}
PLACEMENT = Placement(
    host_blocks=(0, 2),
    num_cached_params=3,
    group_size=2,
    activations=(BlockActivations(swap_input=True, kept=frozenset({"aten.mm.default#0"})),),
    host_activation_nbytes=1 << 20,
)


def test_a_job_without_a_plan_says_so(client: TestClient, file_id: str) -> None:
    job = client.post("/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file_id}).json()
    path = f"/v1/fine_tuning/jobs/{job['id']}/plan"
    response = client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "plan_not_found"
    assert "several boxes" not in response.json()["error"]["message"]
    keep_plan(context_of(client).settings, job["id"])
    plan = client.get(path).json()
    assert PLAN.items() <= plan.items()
    assert (plan["object"], plan["job_id"]) == ("fine_tuning.job.plan", job["id"])
    unknown = {"step_s_low": None, "step_s_high": None}  # as in plans of older releases
    assert plan["predicted"] == {"step_s": 3.0, **unknown, "peak_gib": {"gpu": 2.0, "host": 4.0, "ssd": 8.0}}
    assert plan["measured"] is plan["error"] is plan["simulated"] is None
    assert {"corrected": False, "told": None, "from_attempt": None, "before": []}.items() <= plan.items()
    assert client.get("/v1/fine_tuning/jobs/ftjob-none/plan").status_code == 404
    assert client.get(f"/v1/fine_tuning/jobs/{job['id']}").json()["windlass"]["has_plan"] is True


def test_a_corrected_plan_is_shown_with_the_one_before(client: TestClient, file_id: str) -> None:
    job = client.post("/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file_id}).json()
    context = context_of(client)
    keep_plan(context.settings, job["id"])
    with context.database.write() as session:
        row = JobRepository(session).get(job["id"])
        better = plan_of(plan={**PLAN, "step_s": 2.0}, corrected=True, told="Measured: [...]", from_attempt=2)
        assert job_plans.keep_plan(context.settings, row, better) == 1
    path = f"/v1/fine_tuning/jobs/{job['id']}/plan"
    assert client.get(path).json()["corrected"] is False  # until the row says so
    with context.database.write() as session:
        JobRepository(session).set_fields(job["id"], plan_number=1)
    plan = client.get(path).json()
    assert (plan["corrected"], plan["step_s"], plan["from_attempt"], plan["told"]) == (True, 2.0, 2, "Measured: [...]")
    assert [(each["corrected"], each["step_s"]) for each in plan["before"]] == [(False, 3.0)]


def plan_of(**values: Any) -> JobPlan:
    return JobPlan.model_validate({"plan": PLAN, **values})


def keep_plan(settings: Settings, job_id: str, **more: Any) -> None:
    folder = job_dir(settings, job_id) / "prepare"
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_of(placement=PLACEMENT, arena_nbytes=1 << 20, **more)
    (folder / "plan_job.json").write_text(json.dumps({"ok": True, **plan.to_json()}))


def tell_measured(client: TestClient, job_id: str, *steps: tuple[int, dict[str, Any]]) -> None:
    """Reports steps as the job's runner does."""
    records = [
        JournalRecord(
            attempt=1, seq=seq, created_at=0.0, kind=METRICS, level="info", message="", data={"step": step, **data}
        )
        for seq, (step, data) in enumerate(steps, start=1)
    ]
    with context_of(client).database.write() as session:
        import_journal(session, job_id, 1, records)


def measured_as(step_s: float | None, **nbytes: int) -> dict[str, Any]:
    return {"measured": {"step_s": step_s, "num_steps": 0 if step_s is None else 7, "peak_bytes": nbytes}}


def new_job(client: TestClient, file_id: str) -> tuple[str, str]:
    """Creates a job. Returns its id and the path of its plan."""
    job_id = client.post("/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file_id}).json()["id"]
    return job_id, f"/v1/fine_tuning/jobs/{job_id}/plan"


def test_what_was_measured_stands_beside_what_was_predicted(client: TestClient, file_id: str) -> None:
    job_id, path = new_job(client, file_id)
    summary = {"period_s": 4.0, "busy_s": {"ssd-0": 3.5}}
    promised = {**PLAN, "step_s": 4.0, "bound_s": 3.0}
    keep_plan(context_of(client).settings, job_id, plan=promised, simulated={"step_s": 4.0, "summary": summary})
    tell_measured(client, job_id, (1, measured_as(None, gpu=2 * GIB)))
    plan = client.get(path).json()
    assert plan["measured"]["step_s"] is None
    assert plan["error"] == {
        "step_s": None,
        "recent_step_s": None,
        "peak_gib": {"gpu": 0.0, "host": None, "ssd": None},
    }
    told = measured_as(5.0, gpu=3 * GIB, gpu_reserved=4 * GIB, host=4 * GIB, ssd=6 * GIB)
    tell_measured(client, job_id, (1, {}), (2, told), (3, {"valid_loss": 1.0}))
    plan = client.get(path).json()
    assert (plan["bound_s"], plan["step_s"]) == (3.0, 4.0)
    assert plan["predicted"]["step_s"] == plan["simulated"]["step_s"] == 4.0
    assert plan["simulated"]["summary"] == summary
    assert plan["measured"] == {
        "step_s": 5.0,
        "num_steps": 7,
        "recent": None,
        "peak_gib": {"gpu": 3.0, "host": 4.0, "ssd": 6.0},
        "gpu_reserved_gib": 4.0,
    }
    assert plan["error"] == {"step_s": 0.25, "recent_step_s": None, "peak_gib": {"gpu": 0.5, "host": 0.0, "ssd": -0.25}}


def test_a_job_without_a_plan_is_measured_all_the_same(client: TestClient, file_id: str) -> None:
    job_id, path = new_job(client, file_id)
    tell_measured(client, job_id, (1, measured_as(2.0, host=GIB)))
    plan = client.get(path).json()
    assert plan["predicted"] is plan["error"] is plan["feasible"] is plan["step_s"] is None
    assert plan["measured"]["peak_gib"] == {"gpu": None, "host": 1.0, "ssd": None}
    assert client.get(f"/v1/fine_tuning/jobs/{job_id}").json()["windlass"]["has_plan"] is False


def test_the_command_line_shows_both(
    client: TestClient, file_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id, _ = new_job(client, file_id)
    service = ServiceClient(str(client.base_url))
    service._http = client
    monkeypatch.setattr(cli_ids, "open_client", lambda _: contextlib.nullcontext(service))
    home = context_of(client).settings.home

    def shown() -> str:
        cli_jobs.show(job_id, home)
        return " ".join(capsys.readouterr().out.split())

    assert f".jsonl ({file_id})" in shown()
    assert "step time" not in shown()
    keep_plan(context_of(client).settings, job_id)
    assert "step time predicted 3 s; an estimate until 3 steps are measured device memory" in shown()
    tell_measured(client, job_id, (1, measured_as(3.3, gpu=GIB, host=12 * GIB)))
    lines = (
        "step time predicted 3 s, measured 3.3 s (+10.0%)",
        "device memory predicted 2.00 GiB, measured 1.00 GiB (-50.0%)",
        "host buffers predicted 4.00 GiB, measured 12.00 GiB (3 times as much)",
        "SSD space predicted 8.00 GiB",
    )
    assert " ".join(lines) in shown()


def test_the_simulated_step_is_a_trace(client: TestClient, file_id: str) -> None:
    job_id, path = new_job(client, file_id)
    response = client.get(f"{path}/timeline")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "timeline_not_held")
    span = WorkSpan("ssd-0", SpanKind.READ_STATES, 4, 2, 7, 11.0, 12.0, 4096)
    level = Level(MemoryTier.HOST, "params", 100, ((10.0, 60), (12.0, 0)))
    kept = StepSpans(step=4, start_s=10.0, end_s=14.0, summary={"period_s": 4.0}, spans=(span,), levels=(level,))
    folder = job_dir(context_of(client).settings, job_id) / "prepare"
    folder.mkdir(parents=True)
    keep_step(folder / SIMULATED_FOLDER, kept)
    trace = client.get(f"{path}/timeline").json()
    assert [event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"] == [1e6]
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C" and event["name"] == "params"]
    assert [(event["ts"], event["args"]["used"]) for event in counters] == [(0.0, 60), (2e6, 0)]
    assert trace["otherData"] == {"job_id": job_id, "simulated": True, "summary": {"period_s": 4.0}}
    assert client.get("/v1/fine_tuning/jobs/ftjob-none/plan/timeline").status_code == 404


def test_a_job_over_boxes_without_a_planned_step_may_wait_for_its_boxes(client: TestClient, file_id: str) -> None:
    job_id, path = new_job(client, file_id)
    with context_of(client).database.write() as session:
        job = JobRepository(session).get(job_id)
        JobRepository(session).set_fields(job_id, windlass={**job.windlass, "boxes": 2})
    assert "wait for its boxes to be chosen" in client.get(path).json()["error"]["message"]


def test_the_planned_step_of_a_job_over_boxes_is_that_of_its_division(client: TestClient, file_id: str) -> None:
    job_id, path = new_job(client, file_id)
    settings = context_of(client).settings
    keep_plan(settings, job_id)
    summary = {"period_s": 4.0, "busy_s": {"gpu-0/compute": 1.0, "b1/gpu-0/compute": 3.0}}
    keep_step(
        job_dir(settings, job_id) / "prepare" / SIMULATED_FOLDER,
        StepSpans(step=4, start_s=10.0, end_s=14.0, summary=summary, spans=()),
    )
    assert client.get(path).json()["predicted"] is not None
    with context_of(client).database.write() as session:
        job = JobRepository(session).get(job_id)
        JobRepository(session).set_fields(job_id, windlass={**job.windlass, "boxes": 2})
    shown = client.get(path).json()
    assert shown["simulated"] == {"step_s": 4.0, "summary": summary}
    assert in_words(shown)["step time"] == "predicted 4 s"
    measured = view_of(None, {"step_s": 3.0, "num_steps": 9, "peak_bytes": {}}) | {"simulated": {"step_s": 4.0}}
    assert in_words(measured)["step time"] == "predicted 4 s, measured 3 s (-25.0%)"
    assert (shown["predicted"], shown["step_s"], shown["before"]) == (None, None, [])


# --- the dispatcher -------------------------------------------------------------------------------------------------


def measured(stage: Stage) -> None:
    (stage.settings.home / HARDWARE_FILE).write_text(yaml.safe_dump(MACHINE))


def request_of(stage: Stage) -> PlanRequest:
    """The request to the planner that the last preparation makes."""
    make_request = stage.preparations[-1].order.plan_request
    assert make_request is not None
    return make_request(dict(PREPARED))


def test_the_planner_is_asked_with_resolved_numbers(stage: Stage) -> None:
    measured(stage)
    stage.submit(clip_norm=None, budgets={"host_memory_gib": 4, "gpu_memory_gib": 2})
    stage.tick()
    request = request_of(stage)
    training = request.training
    assert (training.batch_size, training.num_microbatches, training.sequence_length) == (5, 2, 64)
    assert training.clip_norm is None
    assert request.host_memory_nbytes == 4 * 2**30
    assert request.device_memory_nbytes == 2 * 2**30
    assert request.hardware.host.memory_gib == 764
    assert request.simulation_s > 0
    assert request.compute_threads is not None  # measured on its GPU, because no other job runs
    assert PlanRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_the_command_line_asks_what_a_job_would(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = {"host_memory_gib": 5.0, "gpu_memory_gib": 3.0, "num_cpu_optimizers": 2}
    stage = Stage(tmp_path / "home", database, **budgets)
    home = stage.settings.home
    (home / SETTINGS_FILE).write_text("\n".join(f"{name} = {value}" for name, value in budgets.items()))
    cpu = MACHINE | {"gpus": MACHINE["gpus"] | {"count": 0}}
    (home / HARDWARE_FILE).write_text(yaml.safe_dump(cpu))
    stage.submit(batch_size=4, num_microbatches=2, clip_norm=None, precision="fp16", optimizer="adam")
    stage.tick()
    of_job = request_of(stage)
    assert of_job.compute_threads is not None
    assert of_job.training.optimizer is Optimizer.ADAM

    asked: list[PlanRequest] = []

    def note(request: PlanRequest, _: Any, is_alone: Callable[[], bool]) -> None:
        asked.append(request)
        assert is_alone()
        monkeypatch.setattr(shutdown, "is_box_free", lambda _: False)
        assert not is_alone(), "read again with each measurement"
        raise CommandError("that is all")

    monkeypatch.setattr(plan_job, "question_of", note)
    monkeypatch.setattr(MachineResources, "here", lambda _: MachineResources(num_cores=4, num_gpus=0))
    shape = tmp_path / "shape.yaml"
    shape.write_text("num_layers: 4\nhidden_size: 256\nnum_heads: 4\nvocab_size: 1000\n")
    with pytest.raises(CommandError, match="that is all"):
        cli_plan.plan(
            str(shape),
            batch_size=4,
            seq_len=of_job.training.sequence_length,
            num_validation_examples=of_job.num_validation_examples,
            num_microbatches=2,
            precision=Precision.FP16,
            optimizer=Optimizer.ADAM,
            clip=False,
            home=home,
        )
    assert of_job.dataset_dir is not None
    assert (of_job.training.total_steps, of_job.dataset_dir.name) == (6, "dataset")
    training = asked[0].training
    others = {
        "model_dir": asked[0].model_dir,
        "training": training,
        "dataset_dir": None,
        "simulation_s": 0.0,
    }
    assert asked[0] == replace(of_job, **others)
    # The command knows neither the data nor the seed.
    of_data = {name: getattr(of_job.training, name) for name in ("epochs", "total_steps", "evaluate_every", "seed")}
    assert replace(training, **of_data) == of_job.training


def test_what_the_planner_measures_is_kept_if_no_job_runs_meanwhile(stage: Stage) -> None:
    measured(stage)
    stage.submit()
    stage.tick()
    request = request_of(stage)
    assert request.kept_times_dir == stage.settings.home / "measured-models"
    assert request.is_alone
    stage.preparations[-1].ending = PREPARED
    stage.tick()
    stage.tick()
    assert len(stage.runners.started) == 1
    stage.submit()
    stage.tick()
    assert not request_of(stage).is_alone
    assert not stage.preparations[-1].is_alone(), "so a measurement that has begun is told, too"


def test_without_a_profile_nothing_is_planned(stage: Stage) -> None:
    stage.submit()
    stage.tick()
    assert stage.preparations[-1].order.plan_request is None


def test_a_job_that_cannot_fit_is_refused(stage: Stage) -> None:
    job_id = stage.submit()
    stage.tick()
    reasons = ["no plan fits; it lacks 2.00 GiB of host memory", "it fits with 8 GiB of host memory"]
    refused: Results = {**PREPARED, "plan_job": {"ok": True, "plan": {"feasible": False, "reasons": reasons}}}
    stage.preparations[-1].ending = refused
    stage.tick()
    job = stage.job(job_id)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert job.error["code"] == "does_not_fit"
    assert job.error["message"] == "; ".join(reasons)


def test_the_plan_tells_when_a_job_will_finish(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.service.dispatcher.dispatcher.time.time", lambda: 1e9)
    job_id = stage.submit()
    stage.tick()
    keep_plan(stage.settings, job_id)
    stage.preparations[-1].ending = PREPARED
    stage.tick(2)
    job = stage.job(job_id)
    assert job.status is JobStatus.RUNNING
    assert job.total_steps == 4
    assert job.estimated_finish == 1e9 + 4 * 3.0
    assert not job.finish_is_measured
    assert stage.runners.started[-1].expected_pace == Pace(step_s=3.0, is_measured=False)
    with contextlib.closing(stage.journal(job_id, 1)) as journal:
        told = {"total_steps": 4, "train_loss": 2.0}
        journal.append("metrics", "Step 1", step=1, remaining_s=None, remaining_is_estimate=True, **told)
        stage.tick()
        assert stage.job(job_id).estimated_finish is None, "the first step contradicts the plan"
        journal.append("metrics", "Step 2", step=2, remaining_s=50.0, remaining_is_estimate=False, **told)
        stage.tick()
    job = stage.job(job_id)
    assert (job.estimated_finish, job.finish_is_measured) == (1e9 + 50.0, True), "by the steps that were measured"


@pytest.mark.parametrize(
    ("remaining_s", "is_estimate", "found"),
    [
        (20.0, False, Pace(step_s=10.0, is_measured=True, mean_s=10.0)),
        (20.0, True, Pace(step_s=10.0, is_measured=False, mean_s=10.0)),
        (None, True, None),
    ],
)
def test_a_later_attempt_goes_on_with_the_pace_of_the_earlier_one(
    remaining_s: float | None, is_estimate: bool, found: Pace | None
) -> None:
    data = {"step": 2, "total_steps": 4, "remaining_s": remaining_s, "remaining_is_estimate": is_estimate}
    last = JobMetrics(job_id="job", step=2, attempt=1, data=data)
    by_plan = Pace(step_s=3.0, is_measured=False)
    assert expected_pace(plan_of(), None, last) == expected_pace(None, None, last) == found
    assert expected_pace(plan_of(from_attempt=1), None, last) == found
    assert expected_pace(plan_of(from_attempt=2), None, last) == by_plan, "steps before a plan say nothing of it"
    assert expected_pace(plan_of(), None, None) == by_plan
    assert expected_pace(None, None, None) is None


def test_a_prediction_is_an_estimate_until_enough_steps_are_measured() -> None:
    found = plan_of(plan=PLAN | {"example_tokens": {"limit": 2048, "widest": 16, "mean": 14.2, "of_data": True}})

    def view(num_steps: int | None) -> dict[str, Any]:
        measured = None if num_steps is None else {"step_s": 1.9, "num_steps": num_steps, "peak_bytes": {}}
        return view_of(found, measured)

    assert [view(number)["is_estimate"] for number in (None, 0, 2, 3)] == [True, True, True, False]
    assert view_of(None, {"step_s": 1.9, "num_steps": 1, "peak_bytes": {}})["is_estimate"] is None
    words = in_words(view(None))
    assert words["step time"] == "predicted 3 s; an estimate until 3 steps are measured"
    assert words["planned for"] == "examples of 14 tokens on average and 16 at most, with padding"
    assert in_words(view(3))["step time"] == "predicted 3 s, measured 1.9 s (-36.7%)"


def test_how_sure_a_prediction_is_is_told_until_steps_are_measured() -> None:
    sure = {"step_s_low": 2.5, "step_s_high": 3.6, "times_from": "blocks", "num_compared": 12}
    found = plan_of(plan=PLAN | sure)
    view = view_of(found, None)
    assert (view["predicted"]["step_s_low"], view["predicted"]["step_s_high"]) == (2.5, 3.6)
    told = "predicted 3 s; 2.5 to 3.6 s in nine of ten jobs, by 12 jobs of this machine"
    assert in_words(view)["step time"] == f"{told}; an estimate until 3 steps are measured"
    measured = {"step_s": 3.0, "num_steps": 3, "peak_bytes": {}}
    assert in_words(view_of(found, measured))["step time"] == "predicted 3 s, measured 3 s (+0.0%)"


def test_last_steps_are_told_apart_if_they_differ_from_all() -> None:
    def view(recent_s: float, low_s: float | None) -> dict[str, Any]:
        recent = {"step_s": recent_s, "num_steps": 9, "step_s_low": low_s, "step_s_high": low_s and 4.75}
        return view_of(plan_of(), {"step_s": 3.0, "num_steps": 200, "recent": recent, "peak_bytes": {}})

    assert in_words(view(3.08, 2.9))["step time"] == "predicted 3 s, measured 3 s (+0.0%)"
    slower = view(4.5, 4.25)
    assert slower["error"]["recent_step_s"] == pytest.approx(0.5)
    told = "predicted 3 s, measured 3 s (+0.0%); the last 9 steps 4.5 s"
    assert in_words(slower)["step time"] == f"{told}, the next ones likely 4.25 to 4.75 s"
    assert in_words(view(4.5, None))["step time"] == told


def test_a_job_runs_as_it_was_planned(stage: Stage) -> None:
    job_id = stage.submit(budgets={"host_memory_gib": 4, "gpu_memory_gib": 3})
    stage.tick()
    keep_plan(stage.settings, job_id)
    stage.preparations[-1].ending = PREPARED
    stage.tick(2)
    (spec,) = stage.runners.started
    assert spec.placement == PLACEMENT
    assert spec.host_memory_nbytes == 1 << 20
    assert (spec.device_memory_nbytes, spec.planned_device_nbytes) == (3 * GIB, 2 * GIB)


def test_a_job_without_a_plan_is_queued_with_a_warning(stage: Stage) -> None:
    job_id = stage.submit()
    stage.tick()
    why = "no plan was made: DeviceNeedUnknownError: experts"
    stage.preparations[-1].ending = {**PREPARED, "plan_job": {"ok": True, "warnings": [why]}}
    stage.tick(2)
    assert stage.job(job_id).status is JobStatus.RUNNING
    assert why in stage.messages(job_id)
