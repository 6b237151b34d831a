"""The agent of a box: it takes, reports and discards jobs, whatever is lost or killed in between."""

import json
import shutil
import threading
from pathlib import Path

import pytest
from sqlalchemy import update

from tests.support.service.cluster_stage import NAME, Cluster
from windlass.actors.scheduler.scheduler import PAUSED
from windlass.service.cluster.box.agent import run_until
from windlass.service.cluster.box.connection import BoxRemoved, HeadRefused, HeadUnreachable
from windlass.service.data import deletion
from windlass.service.machine.fleet.content import result_file_id, taken_dir
from windlass.service.machine.fleet.hold import read_hold
from windlass.service.machine.fleet.messages import MOST_JOBS
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Checkpoint
from windlass.storage.sql.repositories.boxes import (
    BoxRepository,
    BoxState,
    Instruction,
    JobReport,
    MirrorRepository,
    told_lease_s,
)
from windlass.storage.sql.repositories.jobs import JobRepository


def run(cluster: Cluster) -> str:
    """A job that runs on the box, as the head knows too."""
    job_id = cluster.prepare()
    cluster.give(job_id)
    cluster.until(lambda: cluster.head.status(job_id) is JobStatus.RUNNING)
    return job_id


def train(cluster: Cluster, job_id: str, *steps: int) -> None:
    journal = cluster.box.journal(job_id, cluster.box.job(job_id).attempt)
    for step in steps:
        journal.append("metrics", f"Step {step}", step=step, total_steps=4, train_loss=1.0 / step)
    journal.close()


def write_model(folder: Path, weights: bytes) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)


def save_checkpoint(cluster: Cluster, job_id: str, step: int, *, kept: list[int]) -> Path:
    """Writes a checkpoint as a runner does. `kept`: the steps whose checkpoints stay."""
    spec = cluster.box.runners.started[-1]
    folder = Path(f"{spec.output_dir}-step-{step}")
    write_model(folder, b"weights" * step)
    journal = cluster.box.journal(job_id, spec.attempt)
    facts = {"fine_tuned_model_checkpoint": folder.name, "path": str(folder), "step_number": step}
    journal.append("checkpoint", "saved", **facts, reasons=["last"], kept=[(each, ["last"]) for each in kept])
    journal.close()
    return folder


def succeed(cluster: Cluster, job_id: str) -> str:
    """Ends the job's attempt well, and returns the model's name."""
    spec = cluster.box.runners.started[-1]
    write_model(Path(spec.output_dir), b"final" * 1000)
    journal = cluster.box.journal(job_id, spec.attempt)
    journal.append_outcome("succeeded", "done", trained_tokens=77)
    journal.close()
    cluster.box.end_runner(job_id, spec.attempt)
    return Path(spec.output_dir).name


def test_agent_takes_runs_reports_and_discards_a_job(cluster: Cluster) -> None:
    job_id = run(cluster)
    head, box = cluster.head, cluster.box
    assert cluster.box_row().capacity is not None
    assert (box.settings.models_dir / "tiny" / "model.safetensors").read_bytes() == b"weights"
    assert not (box.settings.jobs_dir / job_id / "prepare" / "kinds").exists()
    tokens = Path("jobs") / job_id / "dataset" / "tokens.bin"
    assert (box.settings.home / tokens).read_bytes() == (head.settings.home / tokens).read_bytes()
    assert head.job(job_id).lease_holder is None
    head.tick(2)  # the head's own dispatcher leaves it alone
    assert not head.runners.started
    train(cluster, job_id, 1, 2)
    cluster.until(lambda: head.job(job_id).step == 2)
    plans = box.settings.jobs_dir / job_id / "plans"
    plans.mkdir()
    (plans / "1.json").write_text("{}")
    name = succeed(cluster, job_id)
    cluster.until(lambda: head.status(job_id) is JobStatus.SUCCEEDED)
    job = head.job(job_id)
    assert (job.node, job.fine_tuned_model, job.trained_tokens) == (head.node, name, 77)
    assert job.waiting_reason is None
    assert (head.settings.fine_tuned_dir / name / "model.safetensors").read_bytes() == b"final" * 1000
    assert (head.settings.files_dir / result_file_id(job_id)).read_text().startswith("step,train_loss")
    assert (head.settings.jobs_dir / job_id / "plans" / "1.json").exists()
    assert not (head.settings.home / "incoming" / job_id).exists()
    assert head.messages(job_id)[-1].startswith("The job has successfully completed")
    cluster.until(lambda: not cluster.has(job_id) and not any(taken_dir(box.settings.home).iterdir()))
    assert not (box.settings.jobs_dir / job_id).exists()
    assert not (box.settings.fine_tuned_dir / name).exists()
    assert not (box.settings.files_dir / result_file_id(job_id)).exists()
    # What the next job needs again stays; what was this job's alone is gone.
    assert (box.settings.models_dir / "tiny" / "config.json").exists()
    left = {path.name for path in (box.settings.home / "blobs").iterdir() if "." not in path.name}
    assert len(left) == 2
    box.tick(3)


def test_agent_measures_the_link_once_an_hour_and_tells_the_head(cluster: Cluster) -> None:
    asked = []
    measure = cluster.link.measure_speed
    cluster.link.measure_speed = lambda: asked.append(cluster.now) or measure()  # type: ignore
    for _ in range(3):
        cluster.agent.tick()
        cluster.now += 60
    speed = cluster.box_row().facts["link_bytes_per_s"]
    assert speed > 1e6
    assert len(asked) == 1
    cluster.now += 3600
    cluster.agent.tick()
    assert len(asked) == 2


def test_head_without_the_call_for_the_link_is_no_error(cluster: Cluster) -> None:
    def refuse() -> float:
        raise HeadRefused("Not Found", "not_found", 404)

    cluster.link.measure_speed = refuse  # type: ignore[method-assign]
    cluster.agent.tick()
    assert cluster.box_row().facts["link_bytes_per_s"] is None


def test_agent_fetches_a_model_once_for_two_jobs(cluster: Cluster) -> None:
    first = run(cluster)
    asked = []
    fetch = cluster.link.content
    cluster.link.content = lambda digest, offset: asked.append(digest) or fetch(digest, offset)  # type: ignore
    second = cluster.prepare()
    cluster.give(second)
    cluster.until(lambda: cluster.has(second))
    assert first != second
    assert asked == []  # even its data is the same


def test_agent_killed_after_each_call_loses_nothing(cluster: Cluster) -> None:
    job_id = cluster.prepare()
    cluster.give(job_id)
    head, name = cluster.head, ""

    def tick_and_die() -> bool:
        cluster.agent.close()
        cluster.new_agent()
        return False

    for _ in range(12):
        with pytest.raises(AssertionError):
            cluster.until(tick_and_die, most=1)
        cluster.agent.tick()
        cluster.agent.tick()
        if not name and cluster.box.runners.started:
            train(cluster, job_id, 1, 2, 3)
            name = succeed(cluster, job_id)
    cluster.until(lambda: head.status(job_id) is JobStatus.SUCCEEDED and not cluster.has(job_id))
    messages = head.messages(job_id)
    assert [message for message in messages if message.startswith("Step")] == ["Step 1", "Step 2", "Step 3"]
    assert sum(message.startswith("The job has successfully completed") for message in messages) == 1


def test_agent_whose_answers_are_lost_reports_each_event_once(cluster: Cluster) -> None:
    sync, num_calls = cluster.link.sync, 0

    def lossy(request: object) -> object:
        nonlocal num_calls
        answer = sync(request)  # type: ignore[arg-type]
        num_calls += 1
        if num_calls % 2:
            raise HeadUnreachable("the answer was lost")
        return answer

    cluster.link.sync = lossy  # type: ignore[method-assign, assignment]
    tick = cluster.agent.tick

    def patient() -> bool:
        try:
            return tick()
        except HeadUnreachable:
            return True

    cluster.agent.tick = patient  # type: ignore[method-assign]
    job_id = run(cluster)
    train(cluster, job_id, 1, 2)
    cluster.until(lambda: cluster.head.job(job_id).step == 2)
    succeed(cluster, job_id)
    cluster.until(lambda: cluster.head.status(job_id) is JobStatus.SUCCEEDED and not cluster.has(job_id))
    messages = cluster.head.messages(job_id)
    assert messages.count("Step 1") == messages.count("Step 2") == messages.count("Fine-tuning job started") == 1


def test_agent_begins_no_job_that_was_taken_back(cluster: Cluster) -> None:
    job_id = cluster.prepare()
    cluster.give(job_id)
    sync = cluster.link.sync

    def taken_back(request: object) -> object:
        if request.done:  # type: ignore[attr-defined]  # just before the head reads that the box has it
            with cluster.head.database.write() as session:
                assert MirrorRepository(session).take_back(job_id, cluster.head.node)
            cluster.head.tick(2)
            assert cluster.head.status(job_id) is JobStatus.RUNNING
        return sync(request)  # type: ignore[arg-type]

    cluster.until(lambda: cluster.has(job_id))
    cluster.link.sync = taken_back  # type: ignore[method-assign, assignment]
    cluster.agent.tick()
    cluster.link.sync = sync  # type: ignore[method-assign]
    cluster.until(lambda: not cluster.has(job_id))
    assert not cluster.box.runners.started
    assert not (cluster.box.settings.jobs_dir / job_id).exists()
    assert cluster.head.job(job_id).node == cluster.head.node


def test_agent_carries_out_requests_and_a_long_copy_delays_none(cluster: Cluster) -> None:
    job_id = run(cluster)
    waits = cluster.prepare()
    cluster.link.job = lambda job: (_ for _ in ()).throw(HeadUnreachable("no answer"))  # type: ignore[method-assign]
    cluster.give(waits)
    with cluster.head.database.write() as session:
        MirrorRepository(session).request(Instruction.PAUSE, job_id, here=cluster.head.node)
    cluster.until(lambda: cluster.box.runners.paused)
    train(cluster, job_id, 1)
    journal = cluster.box.journal(job_id, 1)
    journal.append_outcome(PAUSED, "ended")
    journal.close()
    cluster.box.end_runner(job_id, 1)
    cluster.until(lambda: cluster.head.status(job_id) is JobStatus.PAUSED)
    assert cluster.head.messages(job_id).count("Pausing: the runner ends its attempt after its step") == 1
    with cluster.head.database.write() as session:
        MirrorRepository(session).request(Instruction.CANCEL, job_id, here=cluster.head.node)
    cluster.until(lambda: not cluster.has(job_id))
    assert cluster.head.status(job_id) is JobStatus.CANCELLED
    reason = cluster.head.job(waits).waiting_reason
    assert reason is not None
    assert "no answer" in reason


def test_agent_sends_checkpoints_and_the_head_keeps_those_that_are_kept(cluster: Cluster) -> None:
    job_id = run(cluster)
    models = cluster.head.settings.fine_tuned_dir
    first = save_checkpoint(cluster, job_id, 1, kept=[1])
    cluster.until(lambda: (models / first.name / "config.json").exists())
    rows = lambda: [row.model for row in checkpoints(cluster, job_id)]  # noqa: E731
    cluster.until(lambda: rows() == [first.name])
    assert checkpoints(cluster, job_id)[0].path == str(models / first.name)
    second = save_checkpoint(cluster, job_id, 2, kept=[2])
    for path in first.iterdir():
        path.unlink()
    first.rmdir()
    cluster.until(lambda: rows() == [second.name])
    cluster.until(lambda: not (models / first.name).exists())
    assert (models / second.name / "model.safetensors").read_bytes() == b"weights" * 2


def checkpoints(cluster: Cluster, job_id: str) -> list:  # type: ignore[type-arg]
    with cluster.head.database.read() as session:
        from windlass.storage.sql.repositories.events import EventRepository

        return list(EventRepository(session).checkpoints(job_id, limit=100, after=None).rows)


def test_agent_sends_a_model_again_that_the_head_has_lost(cluster: Cluster) -> None:
    job_id = run(cluster)
    name = succeed(cluster, job_id)
    sent = cluster.box.settings.home / "sent" / f"{job_id}.json"
    cluster.until(lambda: sent.exists() and name in json.loads(sent.read_text()))
    for path in (cluster.head.settings.fine_tuned_dir / name).iterdir():
        path.unlink()
    cluster.until(lambda: cluster.head.status(job_id) is JobStatus.SUCCEEDED)
    assert (cluster.head.settings.fine_tuned_dir / name / "config.json").exists()


def test_agent_sends_a_checkpoint_again_that_the_head_has_lost(cluster: Cluster) -> None:
    job_id = run(cluster)
    folder = save_checkpoint(cluster, job_id, 1, kept=[1])
    copy = cluster.head.settings.fine_tuned_dir / folder.name
    cluster.until(lambda: checkpoints(cluster, job_id))
    sync = cluster.link.sync

    def lost_answer(request: object) -> object:
        sync(request)  # type: ignore[arg-type]
        raise HeadUnreachable("the answer was lost")

    for loses_answer in (False, True):
        shutil.rmtree(copy)
        if loses_answer:
            cluster.link.sync = lost_answer  # type: ignore[method-assign, assignment]
            train(cluster, job_id, 2)
            cluster.box.tick()
            with pytest.raises(HeadUnreachable):
                cluster.agent.tick()
            cluster.link.sync = sync  # type: ignore[method-assign]
        train(cluster, job_id, 3)
        cluster.until((copy / "config.json").exists)
        cluster.until(lambda: [row.model for row in checkpoints(cluster, job_id)] == [folder.name])


@pytest.mark.long
def test_agent_does_not_end_a_job_before_a_lost_checkpoint_was_sent_again(cluster: Cluster) -> None:
    job_id = run(cluster)
    folder = save_checkpoint(cluster, job_id, 1, kept=[1])
    cluster.until(lambda: checkpoints(cluster, job_id))
    shutil.rmtree(cluster.head.settings.fine_tuned_dir / folder.name)
    succeed(cluster, job_id)
    cluster.until(lambda: cluster.head.status(job_id) is JobStatus.SUCCEEDED)
    assert (cluster.head.settings.fine_tuned_dir / folder.name / "config.json").exists()


@pytest.mark.long
def test_agent_sends_a_checkpoint_not_again_that_a_user_has_deleted(cluster: Cluster) -> None:
    job_id = run(cluster)
    folder = save_checkpoint(cluster, job_id, 1, kept=[1])
    cluster.until(lambda: checkpoints(cluster, job_id))
    with cluster.head.database.write() as session:
        removal = deletion.delete_model(session, cluster.head.settings, folder.name)
    assert deletion.carry_out(cluster.head.database, cluster.head.settings, removal)
    train(cluster, job_id, 2)
    cluster.until(lambda: cluster.head.job(job_id).step == 2)
    for _ in range(3):
        with pytest.raises(AssertionError):
            cluster.until(lambda: False, most=2)
    assert not (cluster.head.settings.fine_tuned_dir / folder.name).exists()
    assert not checkpoints(cluster, job_id)


def test_agent_sends_checkpoints_to_a_head_that_was_restored_from_an_older_backup(cluster: Cluster) -> None:
    job_id = run(cluster)
    folder = save_checkpoint(cluster, job_id, 1, kept=[1])
    cluster.until(lambda: checkpoints(cluster, job_id))
    with cluster.head.database.write() as session:
        MirrorRepository(session).forget(job_id)
    copy = cluster.head.settings.fine_tuned_dir / folder.name
    shutil.rmtree(copy)
    cluster.until((copy / "config.json").exists)
    cluster.until(lambda: [row.model for row in checkpoints(cluster, job_id)] == [folder.name])


@pytest.mark.long
def test_agent_replaces_a_checkpoint_with_equal_content_and_the_head_keeps_it(cluster: Cluster) -> None:
    job_id = run(cluster)
    folder = save_checkpoint(cluster, job_id, 1, kept=[1])
    copy = cluster.head.settings.fine_tuned_dir / folder.name
    cluster.until(lambda: checkpoints(cluster, job_id))
    sync = cluster.link.sync

    def late(request: object) -> object:
        """Brings a report to the head after the upload that began when it was made."""
        for transfer in cluster.agent._sendings._transfers.values():
            if transfer.task is not None:
                transfer.task.exception(timeout=20)
        return sync(request)  # type: ignore[arg-type]

    cluster.link.sync = late  # type: ignore[method-assign, assignment]
    for created_at in (1.0, 2.0):
        with cluster.box.database.write() as session:
            session.execute(update(Checkpoint).where(Checkpoint.job_id == job_id).values(created_at=created_at))

        def is_replaced(created_at: float = created_at) -> bool:
            assert (copy / "config.json").exists()
            return [row.created_at for row in checkpoints(cluster, job_id)] == [created_at]

        cluster.until(is_replaced)


def test_agent_holds_when_the_lease_is_over_and_goes_on_when_the_head_answers(cluster: Cluster) -> None:
    job_id = run(cluster)
    sync = cluster.link.sync

    def silent(request: object) -> object:
        raise HeadUnreachable("no answer")

    cluster.link.sync = silent  # type: ignore[method-assign, assignment]
    for passed_s, holds in ((300.0, False), (301.0, True)):
        cluster.now += passed_s
        with pytest.raises(HeadUnreachable):
            cluster.agent.tick()
        assert (read_hold(cluster.box.settings.home) is not None) is holds
    cluster.box.tick()
    assert cluster.box.runners.paused == [(job_id, 1)]
    assert cluster.box.status(job_id) is JobStatus.RUNNING
    train(cluster, job_id, 1)
    journal = cluster.box.journal(job_id, 1)
    journal.append_outcome(PAUSED, "ended")
    journal.close()
    cluster.box.end_runner(job_id, 1)
    cluster.box.tick(3)
    job = cluster.box.job(job_id)
    assert job.status is JobStatus.QUEUED
    reason = f"the head has not answered box {NAME} for longer than its lease of 10 minutes"
    assert job.waiting_reason == reason
    ended = f"Attempt 1 ended after step 1, because {reason}; the job goes on by itself afterwards"
    assert ended in cluster.box.messages(job_id)
    cluster.link.sync = sync  # type: ignore[method-assign]
    cluster.until(lambda: cluster.head.job(job_id).attempt == 2)
    assert cluster.head.status(job_id) is JobStatus.RUNNING


def test_agent_holds_while_the_box_is_drained_and_stops_when_it_is_removed(cluster: Cluster) -> None:
    home = cluster.box.settings.home
    for state, reason in ((BoxState.DRAINING, f"box {NAME} is being drained"), (BoxState.READY, None)):
        with cluster.head.database.write() as session:
            BoxRepository(session).set(cluster.row.id, state=state.value)
        cluster.agent.tick()
        assert read_hold(home) == reason
    with cluster.head.database.write() as session:
        BoxRepository(session).set(cluster.row.id, state=BoxState.REMOVED.value)
    with pytest.raises(BoxRemoved):
        cluster.agent.tick()
    assert read_hold(home) == f"box {NAME} was removed from its service"


def test_agent_gives_a_job_to_a_head_that_was_restored_from_an_older_backup(cluster: Cluster) -> None:
    job_id = run(cluster)
    train(cluster, job_id, 1)
    cluster.until(lambda: cluster.head.job(job_id).step == 1)
    with cluster.head.database.write() as session:
        MirrorRepository(session).forget(job_id)
    cluster.until(lambda: cluster.head.database and cluster.has(job_id) and found(cluster, job_id))
    cluster.until(lambda: cluster.head.messages(job_id).count("Step 1") == 1)
    assert cluster.head.status(job_id) is JobStatus.RUNNING


def found(cluster: Cluster, job_id: str) -> bool:
    with cluster.head.database.read() as session:
        return JobRepository(session).find(job_id) is not None


def test_agent_cancels_and_discards_a_job_that_the_head_has_ended(cluster: Cluster) -> None:
    job_id = run(cluster)
    with cluster.head.database.write() as session:
        session.get_one(type(cluster.head.job(job_id)), job_id).node = cluster.head.node
    cluster.until(lambda: cluster.box.runners.cancelled)
    journal = cluster.box.journal(job_id, 1)
    journal.append_outcome("cancelled", "ended")
    journal.close()
    cluster.box.end_runner(job_id, 1)
    cluster.until(lambda: not cluster.has(job_id))
    assert not (cluster.box.settings.jobs_dir / job_id).exists()


def test_agent_that_has_lost_a_job_takes_it_again_or_says_that_its_states_are_lost(cluster: Cluster) -> None:
    lost = run(cluster)
    cluster.box.end_runner(lost)
    waits = cluster.prepare()
    cluster.give(waits)
    cluster.until(lambda: cluster.has(waits))
    for job_id in (lost, waits):
        with cluster.box.database.write() as session:
            MirrorRepository(session).forget(job_id)
    cluster.until(lambda: cluster.has(waits))
    cluster.until(lambda: "has lost its states" in (cluster.head.job(lost).waiting_reason or ""))
    assert not cluster.has(lost)


def test_run_until_calls_again_after_any_trouble(cluster: Cluster) -> None:
    ending, tick, troubles = threading.Event(), cluster.agent.tick, [HeadUnreachable("no answer"), OSError("disk full")]

    def troubled() -> bool:
        if troubles:
            raise troubles.pop()
        ending.set()
        return tick()

    cluster.agent.tick = troubled  # type: ignore[method-assign]
    run_until(ending, cluster.agent, pause_s=0.01)
    assert ending.is_set()


def test_the_head_remembers_the_lease_that_it_told(cluster: Cluster) -> None:
    cluster.agent.tick()
    assert told_lease_s(cluster.box_row()) == 60 * cluster.head.settings.box_lease_minutes
    cluster.now += 1000  # the facts are told again
    cluster.agent.tick()
    assert told_lease_s(cluster.box_row()) == 60 * cluster.head.settings.box_lease_minutes


@pytest.mark.long
def test_agent_with_more_reports_than_a_call_may_have_sends_them_in_several(cluster: Cluster) -> None:
    left = [JobReport(id=f"ftjob-{number:024x}", fields={"status": "queued"}) for number in range(2 * MOST_JOBS + 1)]
    cluster.agent._reports = lambda _jobs: [each for each in left if each.id not in cluster.agent._told]  # type: ignore
    for told in (MOST_JOBS, 2 * MOST_JOBS, 2 * MOST_JOBS + 1):
        cluster.agent.tick()
        assert len(cluster.agent._told) == told
