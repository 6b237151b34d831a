"""Jobs whose processes are killed, on real Ray and through the real dispatcher, get the results of undisturbed jobs."""

import random
import time
from collections import Counter

import pytest

from tests.integration.resume_stage import NUM_STEPS, RAY, ResumeStage, Undisturbed
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.events import EventRepository

NUM_JOBS, KILLS_PER_JOB = 14, 3
LEAST_KILLS = 30
VICTIMS = ("ssd-0", "ssd-1", "gpu-0", "optimizer-0", "runner", "all", *RAY)


# Without its runner the other processes end as well. With "all", the test kills them itself.
# In `make test`, tests/e2e/test_upgrade.py has a job go on whose processes were all killed.
@pytest.mark.long
@pytest.mark.parametrize("victim", ["runner", "ssd-0", "all"])
def test_a_job_goes_on_after_the_loss_of(stage: ResumeStage, undisturbed: Undisturbed, victim: str) -> None:
    job_id = stage.submit()
    stage.wait_for_step(job_id, attempt=1, step=5)
    everyone = ["gpu-0", "optimizer-0", "runner", "ssd-0", "ssd-1"]
    assert stage.kill(job_id, victim) == (everyone if victim == "all" else [victim])
    assert max(stage.losses(job_id)) < NUM_STEPS, "the job was over before it was killed: it must train longer"
    stage.finish(job_id)

    job = stage.job(job_id)
    assert (job.attempt, job.step) == (2, NUM_STEPS)
    assert stage.losses(job_id) == undisturbed.losses
    assert stage.model(job_id) == undisturbed.model
    with stage.database.read() as session:
        rows = EventRepository(session).metrics(job_id)
    assert {row.step: row.data["train_loss"] for row in rows} == undisturbed.losses
    assert {row.attempt for row in rows} == {1, 2}
    messages = stage.messages(job_id)
    (lost,) = [message for message in messages if message.startswith("Attempt 1 was lost: ")]
    assert lost.endswith("; going on from the last committed step")
    assert ("the process of ssd-0 died" in lost) == (victim == "ssd-0")
    resumed = [message for message in messages if message.startswith("Resuming after step ")]
    assert len(resumed) == 1
    assert int(resumed[0].rpartition(" ")[2]) >= 5


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_jobs_go_on_after_kills_at_random_moments(stage: ResumeStage, undisturbed: Undisturbed) -> None:
    generator = random.Random(2026)
    victims = list(VICTIMS) * -(-NUM_JOBS * KILLS_PER_JOB // len(VICTIMS))
    generator.shuffle(victims)
    hit: Counter[str] = Counter()
    attempts: Counter[int] = Counter()
    for _ in range(NUM_JOBS):
        job_id = stage.submit()
        hit += _disturb(stage, job_id, victims, generator)
        stage.finish(job_id)
        attempts[stage.job(job_id).attempt] += 1
        assert stage.losses(job_id) == undisturbed.losses
        assert stage.model(job_id) == undisturbed.model
    print(f"kills: {dict(sorted(hit.items()))}; jobs by attempts: {dict(sorted(attempts.items()))}")
    assert hit.total() >= LEAST_KILLS


def _disturb(stage: ResumeStage, job_id: str, victims: list[str], generator: random.Random) -> Counter[str]:
    """Kills one of `victims` in each of a job's successive attempts, at most one of them while its attempt starts."""
    hit: Counter[str] = Counter()
    steps = sorted(generator.sample(range(1, NUM_STEPS - 3), KILLS_PER_JOB))
    # index of the attempt that is hit while it starts, if there is such an attempt
    early = generator.randrange(2 * KILLS_PER_JOB)
    for i, step in enumerate(steps):
        job = stage.job(job_id)
        attempt = job.attempt + (job.status is not JobStatus.RUNNING)
        stage.wait_for_step(job_id, attempt, 0 if i == early else step)
        time.sleep(generator.uniform(0.0, 5.0 if i == early else 0.3))
        victim = victims.pop()
        if i == early and victim not in RAY:
            victim = "all"  # while they start, processes can't be told apart
        if stage.is_over(job_id) or not stage.kill(job_id, victim):
            continue  # the attempt ended first
        hit[f"{victim}, early" if i == early else victim] += 1
        stage.wait_for_attempt(job_id, attempt + 1)
    return hit
