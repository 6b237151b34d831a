"""Jobs that continue with another plan, on real Ray and through the real dispatcher, without loss."""

import pytest

from tests.integration.resume_stage import NUM_STEPS, ResumeStage, Undisturbed
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import Placement
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.report import PlanReport
from windlass.service.jobs.plan_files import keep_plan
from windlass.storage.sql.repositories.jobs import JobRepository

OTHER = Placement(
    host_blocks=(0, 2),
    device_blocks=(3,),
    num_cached_params=4,
    activations=ActivationChoice.SWAP.of_layers(3),
    host_activation_nbytes=40 << 20,
    ssd_activation_nbytes=40 << 20,
)


def change_plan(stage: ResumeStage, job_id: str) -> None:
    """Changes the job's plan as if the planner had found a better one."""
    job = stage.job(job_id)
    plan = JobPlan(
        report=PlanReport(feasible=True, reasons=(), step_s=0.1),
        placement=OTHER,
        message="Measured: [...]",
        corrected=True,
        from_attempt=job.attempt + 1,
    )
    number = keep_plan(stage.settings, job, plan)
    with stage.database.write() as session:
        JobRepository(session).set_fields(job_id, plan_number=number)


@pytest.mark.long
def test_a_job_goes_on_with_another_plan_and_trains_no_step_twice(stage: ResumeStage, undisturbed: Undisturbed) -> None:
    job_id = stage.submit()
    stage.wait_for_step(job_id, attempt=1, step=5)
    change_plan(stage, job_id)
    stage.finish(job_id)
    job = stage.job(job_id)
    assert (job.attempt, job.step, job.plan_number) == (2, NUM_STEPS, 1)
    ended = [message for message in stage.messages(job_id) if message.startswith("Attempt 1 ended after step ")]
    assert len(ended) == 1
    last_step = int(ended[0].split()[5].strip(","))
    assert 5 <= last_step < NUM_STEPS
    resumed = [message for message in stage.messages(job_id) if "esuming" in message]
    assert resumed == [f"Resuming after step {last_step}"]
    told = {record.data["step"]: record.attempt for record in stage.journal(job_id) if "train_loss" in record.data}
    assert told == {step: 1 if step <= last_step else 2 for step in range(1, NUM_STEPS + 1)}
    assert Undisturbed(stage.losses(job_id), stage.model(job_id)) == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("moment", ["as it is asked to end", "as the next one starts"])
def test_plan_change_with_killed_process_loses_no_step(
    stage: ResumeStage, undisturbed: Undisturbed, moment: str
) -> None:
    job_id = stage.submit()
    stage.wait_for_step(job_id, attempt=1, step=5)
    change_plan(stage, job_id)
    if moment == "as the next one starts":
        stage.wait_for_attempt(job_id, 2)
    stage.kill(job_id, "all")
    stage.finish(job_id)
    job = stage.job(job_id)
    assert (job.step, job.plan_number) == (NUM_STEPS, 1)
    assert job.attempt in (2, 3)
    assert Undisturbed(stage.losses(job_id), stage.model(job_id)) == undisturbed
