"""Records how good a job's prediction was, for the predictions of later jobs on this machine."""

from windlass.planner.predictions import PastPrediction, PastPredictions
from windlass.service.installation import Settings
from windlass.service.jobs.plan_files import plans_of
from windlass.service.jobs.spec_builder import kept_times_dir
from windlass.storage.sql import Database, Job
from windlass.storage.sql.repositories import EventRepository

# Steps that must be measured. Fewer say more about the machine's pace at that moment.
_MIN_STEPS = 10
# Seconds of a predicted step. In shorter ones the scheduler's own time counts, which no plan includes.
_MIN_STEP_S = 1.0


def record_prediction(database: Database, settings: Settings, job: Job) -> None:
    """Stores a job's first prediction beside its measured steps. A later attempt of the job replaces it.

    Does nothing for a job without a plan, one that ran by several plans, or one with too few or too short steps.
    """
    plans = plans_of(settings, job)
    if not plans or any(plan.from_attempt is not None for plan in plans):
        return
    report = plans[0].report
    if report.step_s is None or report.step_s < _MIN_STEP_S or report.times_from is None:
        return
    with database.read() as session:
        measured = EventRepository(session).last_measured(job.id)
    if measured is None or not measured["step_s"] or measured["num_steps"] < _MIN_STEPS:
        return
    PastPredictions(folder=kept_times_dir(settings)).add(
        PastPrediction(
            job_id=job.id,
            times_from=report.times_from,
            predicted_s=report.step_s,
            measured_s=measured["step_s"],
            num_steps=measured["num_steps"],
        )
    )
