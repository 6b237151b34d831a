"""The dispatcher, with a real database and journals, and stand-ins for Ray and for the preparation's processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service.dispatcher_stage import PREPARED, Stage
from windlass.actors.lifecycle.cpu_affinity import numa_nodes
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.training_config.training_config import NUMERICS, Optimizer
from windlass.service.data import job_remains as leftovers
from windlass.service.dispatcher.job_watch import AttemptPhase, StopKind
from windlass.service.installation.settings import Settings
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.spec_builder import build_job_spec
from windlass.service.preparation.pipeline import PreparationError
from windlass.storage.ids import HeadSlices, ModelKernel, Precision, StatePrecision
from windlass.storage.memory.capacity import InsufficientSpaceError
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus


def test_a_job_is_prepared_then_runs_with_its_hyperparameters_resolved(stage: Stage) -> None:
    job_id = stage.submit()
    stage.tick(3)
    assert stage.status(job_id) is JobStatus.VALIDATING_FILES
    assert len(stage.preparations) == 1
    assert stage.preparations[0].order.training_file == stage.settings.files_dir / "file-train"
    assert stage.preparations[0].order.sequence_length == 64

    stage.preparations[0].ending = PREPARED
    stage.tick(2)
    job = stage.job(job_id)
    assert (job.status, job.attempt, job.total_steps) == (JobStatus.RUNNING, 1, 4)
    (spec,) = stage.runners.started
    assert (spec.job, spec.attempt, spec.training.total_steps, spec.num_validation_examples) == (job_id, 1, 4, 2)
    assert (spec.training.epochs, spec.training.batch_size) == (2, 5)
    assert (spec.compute_threads, spec.num_cpu_optimizers) == (4, len(numa_nodes()))
    assert spec.training.evaluate_every == 2  # an epoch
    assert spec.output_dir == str(stage.settings.fine_tuned_dir / f"ft:tiny::{job_id[6:18]}")
    assert "train.jsonl: 1 examples are longer than 8 tokens and were cut" in stage.messages(job_id)


def test_a_job_runs_with_the_words_it_asked_for(stage: Stage) -> None:
    stage.submit(precision="fp16", optimizer="adam", accumulation_precision="fp16", gradient_updates="after_backward")
    stage.tick()
    stage.preparations[0].ending = PREPARED
    stage.tick(2)
    hyper = stage.runners.started[0].training
    assert (hyper.precision, hyper.accumulation_precision) == (Precision.FP16, Precision.FP16)
    assert (hyper.optimizer, hyper.update_order) == (Optimizer.ADAM, UpdateOrder.AFTER_BACKWARD)
    # JSON strings would be equal, but not of the enum's type.
    assert isinstance(hyper.precision, Precision)
    assert isinstance(hyper.state_precision, StatePrecision)
    assert isinstance(hyper.update_order, UpdateOrder)
    assert stage.preparations[0].order.precision is Precision.FP16


@pytest.mark.parametrize(("stored", "expected"), [(None, None), ([], ()), (["liger"], (ModelKernel.LIGER,))], ids=str)
def test_a_models_kernels_are_kept_as_words(stage: Stage, stored: list[str] | None, expected: object) -> None:
    job = stage.job(stage.queue())
    assert job.hyperparameters is not None
    assert job.hyperparameters["model_kernels"] is None
    job.hyperparameters = {**job.hyperparameters, "model_kernels": stored}
    hyper = build_job_spec(stage.settings, MachineResources(num_cores=4, num_gpus=0), job).training
    assert hyper.model_kernels == expected


def test_a_job_of_an_older_version_has_the_defaults(stage: Stage) -> None:
    job = stage.job(stage.queue())
    later = ("optimizer", "state_precision", "accumulation_precision", "update_order", "max_bad_steps", "model_kernels")
    later += ("head_slices", "lanes", "numerics")
    assert job.hyperparameters is not None
    assert (job.hyperparameters["lanes"], job.hyperparameters["numerics"]) == (1, NUMERICS)
    assert job.hyperparameters["head_slices"] == HeadSlices.LARGE
    job.hyperparameters = {name: value for name, value in job.hyperparameters.items() if name not in later}
    hyper = build_job_spec(stage.settings, MachineResources(num_cores=4, num_gpus=0), job).training
    assert (hyper.optimizer, hyper.state_precision) == (Optimizer.ADAMW, StatePrecision.FP32)
    assert (hyper.accumulation_precision, hyper.max_bad_steps) == (Precision.FP32, 10)
    assert (hyper.update_order, hyper.order_of_updates) == (UpdateOrder.KEPT, UpdateOrder.KEPT)
    assert hyper.model_kernels is None
    assert hyper.head_slices is HeadSlices.SMALL
    assert (hyper.lanes, hyper.numerics) == (1, 1)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (14, 2, 1)),
        ({"num_cpu_optimizers": 2}, (14, 1, 2)),
        ({"num_cpu_optimizers": 15}, (1, 1, 15)),
        ({"num_cpu_optimizers": 2, "optimizer_threads": 3, "compute_threads": 5}, (5, 3, 2)),
    ],
)
def test_settings_give_the_threads_of_a_job(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, asked: dict[str, int], expected: tuple[int, int, int]
) -> None:
    monkeypatch.setattr("windlass.service.installation.settings.num_cores", lambda: 16)
    monkeypatch.setattr("windlass.service.jobs.spec_builder.numa_nodes", lambda: [frozenset(range(16))])
    job = stage.job(stage.queue())
    settings = Settings(home=stage.settings.home, **asked)
    spec = build_job_spec(settings, MachineResources(num_cores=16, num_gpus=0), job)
    assert (spec.compute_threads, spec.optimizer_threads, spec.num_cpu_optimizers) == expected


def test_an_optimizer_has_no_more_threads_than_its_numa_node_cores(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [frozenset(range(12)), frozenset({12, 13})]
    monkeypatch.setattr("windlass.service.installation.settings.numa_nodes", lambda: nodes)
    monkeypatch.setattr("windlass.service.installation.settings.num_cores", lambda: 14)
    monkeypatch.setattr("windlass.service.jobs.spec_builder.numa_nodes", lambda: nodes)
    settings = Settings(home=stage.settings.home)
    spec = build_job_spec(settings, MachineResources(num_cores=14, num_gpus=1), stage.job(stage.queue()))
    assert (spec.num_cpu_optimizers, spec.optimizer_threads) == (2, 2)


def test_preparation_error_fails_the_job(stage: Stage) -> None:
    job_id = stage.submit()
    stage.tick()
    stage.preparations[0].ending = PreparationError("invalid_file", "line 3: no messages", "training_file")
    stage.tick()
    job = stage.job(job_id)
    assert job.status is JobStatus.FAILED
    assert job.error == {"code": "invalid_file", "message": "line 3: no messages", "param": "training_file"}
    assert stage.preparations[0].stopped


def test_cancelling_a_job_that_is_prepared_ends_its_process(stage: Stage) -> None:
    job_id = stage.submit()
    stage.tick()
    stage.request_cancel(job_id)
    stage.tick()
    assert stage.preparations[0].stopped
    assert stage.status(job_id) is JobStatus.CANCELLED


def test_a_job_cancelled_while_its_preparation_ends_stays_cancelled(stage: Stage) -> None:
    job_id = stage.submit()
    stage.tick()
    stage.preparations[0].ending = PREPARED
    seen = stage.job(job_id)
    stage.request_cancel(job_id)
    stage.dispatcher._guarded(job_id, stage.dispatcher._preparations.advance, seen, [seen])
    assert stage.status(job_id) is JobStatus.CANCELLED
    assert stage.runners.started == []


def test_the_second_job_waits_for_the_device_and_says_why_once(stage: Stage) -> None:
    first, journal = stage.run()
    second, third = stage.queue(), stage.queue()
    stage.tick(3)
    assert stage.job(second).waiting_reason == f"the CPU is in use by job {first}"
    assert stage.job(third).waiting_reason == f"the CPU is in use by job {first}; 1 queued job is before this one"
    assert sum("the CPU is in use" in message for message in stage.messages(second)) == 1

    stage.export_model()
    journal.append_outcome("succeeded", "The model is ready")
    journal.close()
    stage.tick()
    # Its memory and device are free only once its processes have ended.
    assert stage.status(first) is JobStatus.SUCCEEDED
    assert stage.status(second) is JobStatus.QUEUED
    stage.end_runner(first)
    stage.tick()
    assert stage.status(second) is JobStatus.RUNNING
    assert stage.job(second).waiting_reason is None
    assert stage.status(third) is JobStatus.QUEUED


def test_dispatcher_forgets_a_job_once_its_processes_are_gone(stage: Stage) -> None:
    job_id, journal = stage.run()
    watches = stage.dispatcher._watches
    attempt = watches[job_id].attempt
    assert attempt is not None
    assert (attempt.attempt, attempt.phase) == (1, AttemptPhase.RUNNING)
    stage.request_cancel(job_id)
    stage.tick()
    assert (attempt.phase, attempt.last_stop_request) == (AttemptPhase.STOPPING, (StopKind.CANCEL, stage.now))
    journal.append_outcome("cancelled", "Cancelled")
    journal.close()
    stage.tick()
    assert (stage.status(job_id), attempt.phase) == (JobStatus.CANCELLED, AttemptPhase.EXITING)
    stage.end_runner(job_id)
    stage.tick()
    assert attempt.phase is AttemptPhase.EXITED
    assert not watches


def test_every_gpu_gets_a_job(tmp_path: Path, database: Database) -> None:
    stage = Stage(tmp_path / "home", database, num_gpus=2)
    jobs = [stage.queue() for _ in range(3)]
    stage.tick(2)
    assert [stage.status(job) for job in jobs] == [JobStatus.RUNNING, JobStatus.RUNNING, JobStatus.QUEUED]
    assert str(stage.job(jobs[2]).waiting_reason).startswith("every GPU is in use by job")


def test_success_brings_the_model_the_tokens_and_the_result_file(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.append("metrics", "Step 1", step=1, total_steps=4, train_loss=2.5, train_mean_token_accuracy=0.25)
    journal.append("metrics", "Step 2", step=2, total_steps=4, train_loss=2.0, train_mean_token_accuracy=0.5)
    journal.append("metrics", "Step 2: validation", step=2, valid_loss=2.25, valid_mean_token_accuracy=0.375)
    stage.tick()
    assert stage.job(job_id).step == 2
    stage.put_states(job_id)
    stage.export_model()
    journal.append_outcome("succeeded", "The model is ready", trained_tokens=120)
    journal.close()
    stage.tick()
    job = stage.job(job_id)
    assert (job.status, job.trained_tokens) == (JobStatus.SUCCEEDED, 120)
    assert job.fine_tuned_model == f"ft:tiny::{job_id[6:18]}"
    (result,) = job.result_files
    assert (stage.settings.files_dir / result).read_text() == (
        "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy\n1,2.5,0.25,,\n2,2.0,0.5,2.25,0.375\n"
    )
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
    stage.end_runner(job_id)
    stage.tick()
    assert stage.jobs_on_ssds() == [set(), set()]


def test_the_arena_of_a_killed_runner_is_removed(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a folder of its own, because a start of any job removes arenas without an owner.
    monkeypatch.setattr(leftovers, "ARENA_DIR", tmp_path)
    job_id, journal = stage.run()
    journal.close()
    code = (
        "import sys; from pathlib import Path; from windlass.storage.memory.arena import arena_path\n"
        "path = arena_path(Path(sys.argv[1]), sys.argv[2], 1); path.write_bytes(b'slots'); print(path)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), job_id]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    arena = Path(made.stdout.strip())
    assert arena.exists()
    stage.end_runner(job_id)
    stage.tick(2)
    assert not arena.exists()


def test_success_without_a_model_is_a_failure(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.append_outcome("succeeded", "The model is ready")
    journal.close()
    stage.tick()
    assert stage.job(job_id).error is not None
    assert stage.job(job_id).error["code"] == "model_missing"  # type: ignore[index]


def test_the_runners_error_becomes_the_jobs(stage: Stage) -> None:
    job_id, journal = stage.run()
    error = {"code": "training_failed", "message": "ssd-1: the disk is broken", "param": None}
    journal.append_outcome("failed", "ssd-1: the disk is broken", error)
    journal.close()
    stage.tick()
    assert stage.job(job_id).error == error


def test_a_runner_that_ended_with_an_outcome_is_not_lost(stage: Stage) -> None:
    job_id, journal = stage.run()
    stage.export_model()
    journal.append_outcome("succeeded", "The model is ready")
    journal.close()
    stage.end_runner(job_id)
    stage.tick()
    assert stage.status(job_id) is JobStatus.SUCCEEDED


def test_a_refused_start_fails_the_job_and_frees_the_device(stage: Stage) -> None:
    stage.runners.refusal = InsufficientSpaceError(
        "the model states", "/ssd0", 1 << 40, 1 << 30, "choose a larger disk"
    )
    first = stage.queue()
    stage.tick()
    job = stage.job(first)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert "1024.00 GiB" in job.error["message"]
    stage.runners.refusal = None
    second = stage.queue()
    stage.tick(2)
    assert stage.status(second) is JobStatus.RUNNING


def test_cancelling_a_running_job_tells_its_runner_and_tells_again(stage: Stage) -> None:
    job_id, journal = stage.run()
    stage.request_cancel(job_id)
    stage.tick(3)
    assert stage.runners.cancelled == [(job_id, 1)]
    stage.now += 11
    stage.tick()
    assert stage.runners.cancelled == [(job_id, 1)] * 2
    journal.append_outcome("cancelled", "The job was cancelled")
    journal.close()
    stage.tick()
    assert stage.status(job_id) is JobStatus.CANCELLED


def test_a_runner_killed_by_its_cancellation_leaves_a_cancelled_job(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.request_cancel(job_id)
    stage.tick()
    stage.end_runner(job_id)
    stage.tick()
    assert stage.status(job_id) is JobStatus.CANCELLED


def test_a_runner_that_stays_long_after_its_outcome_is_killed(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.append_outcome("failed", "broken", {"code": "x", "message": "broken", "param": None})
    journal.close()
    stage.tick(2)
    stage.now += 179
    stage.tick()
    assert (job_id, 1) in stage.runners.alive
    stage.now += 1
    stage.tick()
    assert (job_id, 1) not in stage.runners.alive


def test_a_new_dispatcher_goes_on_where_the_old_one_stopped(stage: Stage) -> None:
    job_id, journal = stage.run()
    for step in (1, 2):
        journal.append("metrics", f"Step {step}", step=step, total_steps=4, train_loss=1.0)
    stage.tick()
    journal.append("metrics", "Step 3", step=3, total_steps=4, train_loss=1.0)
    stage.new_dispatcher()
    stage.tick(2)
    journal.append("metrics", "Step 4", step=4, total_steps=4, train_loss=1.0)
    journal.close()
    stage.tick()
    steps = [message for message in stage.messages(job_id) if message.startswith("Step")]
    assert steps == ["Step 1", "Step 2", "Step 3", "Step 4"]
    assert stage.status(job_id) is JobStatus.RUNNING
    assert len(stage.runners.started) == 1


def test_new_dispatcher_ends_runners_of_finished_jobs(stage: Stage) -> None:
    job_id, journal = stage.run()
    stage.put_states(job_id)
    journal.append_outcome("cancelled", "The job was cancelled")
    journal.close()
    stage.tick()
    stage.new_dispatcher().tick()
    waiting = stage.queue()
    assert stage.status(waiting) is JobStatus.QUEUED
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
    stage.end_runner(job_id)
    stage.tick(2)
    assert stage.jobs_on_ssds() == [set(), set()]
    assert stage.status(waiting) is JobStatus.RUNNING


def test_a_new_dispatcher_prepares_again_what_was_being_prepared(stage: Stage) -> None:
    job_id = stage.submit()
    stage.tick()
    stage.new_dispatcher()
    stage.tick()
    assert len(stage.preparations) == 2
    stage.preparations[1].ending = PREPARED
    stage.tick(2)
    assert stage.status(job_id) is JobStatus.RUNNING


def test_records_of_a_failed_import_are_not_lost(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.service.dispatcher import outcomes

    job_id, journal = stage.run()
    journal.append("message", "told once")
    journal.close()
    real = outcomes.import_journal

    def locked(*_arguments: object) -> None:
        raise TimeoutError("database is locked")

    monkeypatch.setattr(outcomes, "import_journal", locked)
    stage.tick()
    monkeypatch.setattr(outcomes, "import_journal", real)
    stage.tick(2)
    assert stage.messages(job_id).count("told once") == 1


def test_a_damaged_journal_fails_the_job(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.append("message", "one")
    journal.append("message", "two")
    journal.close()
    path = stage.settings.jobs_dir / job_id / "journal.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[1])
    stage.tick()
    job = stage.job(job_id)
    assert job.error is not None
    assert job.error["code"] == "journal_damaged"


def test_trouble_with_one_job_does_not_stop_another(tmp_path: Path, database: Database) -> None:
    stage = Stage(tmp_path / "home", database, num_gpus=2)
    broken, sound = stage.queue(), stage.queue()
    stage.tick()
    stage.runners.broken_for = broken
    journal = stage.journal(sound, 1)
    journal.append("message", "heard")
    journal.close()
    stage.tick()
    assert "heard" in stage.messages(sound)
    assert stage.status(broken) is JobStatus.RUNNING


def test_close_ends_preparations_and_leaves_runners(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.submit()
    stage.tick()
    stage.dispatcher.close()
    assert stage.preparations[-1].stopped
    assert stage.runners.cancelled == []
    assert (job_id, 1) in stage.runners.alive
