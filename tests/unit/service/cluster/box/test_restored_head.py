"""A head that was restored from a backup of the time before its box began a job."""

import time

from tests.support.service.cluster_stage import NAME, Cluster, add_box
from tests.unit.service.cluster.box.test_agent import run, train
from windlass.service.installation.restored import mark_restored, was_restored
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.boxes import BoxRepository, Instruction

REASON = f"the service was restored from a backup; box {NAME} has not called yet"


def restore(cluster: Cluster, job_id: str, *, node: str, status: JobStatus = JobStatus.QUEUED) -> None:
    """Restores the head as of before the job began. `node`: the home that had the job then."""
    with cluster.head.database.write() as session:
        job = session.get(Job, job_id)
        assert job is not None
        job.node, job.lease_holder, job.status = node, None, status
        job.attempt = job.box_cursor = job.step = 0
        BoxRepository(session).set(cluster.row.id, seen_at=time.time() - 3600)
    mark_restored(cluster.head.settings.home)
    cluster.head.new_dispatcher()


def goes_on(cluster: Cluster, job_id: str) -> None:
    """The box calls, and its job goes on there."""
    assert len(cluster.head.runners.started) == 0
    cluster.agent.tick()
    cluster.head.tick(2)
    cluster.box.tick()
    cluster.until(lambda: cluster.head.job(job_id).step == 3)
    assert (cluster.head.status(job_id), cluster.head.job(job_id).node) == (JobStatus.RUNNING, cluster.box.node)
    assert (cluster.box.runners.cancelled, cluster.head.runners.started) == ([], [])


def test_a_job_that_a_box_began_after_the_backup_waits_for_its_call(cluster: Cluster) -> None:
    job_id = run(cluster)
    train(cluster, job_id, 1, 2, 3)
    cluster.until(lambda: cluster.head.job(job_id).step == 3)
    restore(cluster, job_id, node=cluster.head.node)
    cluster.head.tick(2)
    assert (cluster.head.status(job_id), cluster.head.job(job_id).waiting_reason) == (JobStatus.QUEUED, REASON)
    goes_on(cluster, job_id)
    assert not was_restored(cluster.head.settings.home)


def test_a_job_that_its_box_took_after_the_backup_is_not_taken_back(cluster: Cluster) -> None:
    job_id = run(cluster)
    train(cluster, job_id, 1, 2, 3)
    cluster.until(lambda: cluster.head.job(job_id).step == 3)
    restore(cluster, job_id, node=cluster.box.node)
    with cluster.head.database.write() as session:
        BoxRepository(session).instruct(cluster.row.id, job_id, Instruction.TAKE)
    cluster.head.tick()
    cluster.head.now += 60
    cluster.head.tick(2)
    assert cluster.head.job(job_id).node == cluster.box.node
    cluster.agent.tick()
    with cluster.head.database.read() as session:
        assert BoxRepository(session).instructions_about(job_id) == [], "one call suffices"
    goes_on(cluster, job_id)


def test_a_job_that_another_box_was_to_take_stays_on_the_box_that_has_it(cluster: Cluster) -> None:
    job_id = run(cluster)
    train(cluster, job_id, 1, 2, 3)
    cluster.until(lambda: cluster.head.job(job_id).step == 3)
    other = add_box(cluster.head.database, "cellar", "node-cellar", head=cluster.head.node)
    restore(cluster, job_id, node=other.node)
    with cluster.head.database.write() as session:
        BoxRepository(session).instruct(other.id, job_id, Instruction.TAKE)
    cluster.head.tick(2)
    goes_on(cluster, job_id)


def test_a_job_that_was_paused_at_the_time_of_the_backup_stays_on_its_box(cluster: Cluster) -> None:
    job_id = run(cluster)
    train(cluster, job_id, 1, 2, 3)
    cluster.until(lambda: cluster.head.job(job_id).step == 3)
    restore(cluster, job_id, node=cluster.head.node, status=JobStatus.PAUSED)
    cluster.head.tick(2)
    goes_on(cluster, job_id)


def test_a_restored_head_waits_no_longer_than_a_lease(cluster: Cluster) -> None:
    job_id = cluster.prepare()
    restore(cluster, job_id, node=cluster.head.node)
    cluster.head.tick()
    cluster.head.now += 60 * cluster.head.settings.box_lease_minutes - 1
    cluster.head.tick()
    assert cluster.head.job(job_id).waiting_reason == REASON
    cluster.head.now += 1
    cluster.head.tick(2)
    assert cluster.head.status(job_id) is JobStatus.RUNNING
    assert not was_restored(cluster.head.settings.home)
