"""Corrections of plans while their jobs run: once per job, by the measured times of its first steps.

The job keeps running, because a separate process runs the planner. If the new plan is worth a restart, it holds from
the next attempt on, and the running attempt ends at its next commit. All state is in the job's row and its plans. So a
correction survives the dispatcher.
"""

import logging
import shutil
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.actors.timeline import FOLDER
from windlass.planner.planning import MIN_STEPS
from windlass.service.installation import Settings
from windlass.service.jobs import job_dir, keep_plan, load_plan, load_question, made_for
from windlass.service.preparation import PLAN_JOB, Preparation, PreparationError, plan_step, tell_warnings
from windlass.service.preparation.sandbox import Start, start_limited
from windlass.storage.ids import Attempt
from windlass.storage.sql import Database, Job, JobMetrics
from windlass.storage.sql.repositories import EventRepository, JobRepository

_LOG = logging.getLogger(__name__)

# First steps of an attempt that are not measured, because kernels are compiled and no transfers are in flight yet.
_NUM_FIRST_STEPS = 2
# Minimum remaining time of a job for a correction. Planning takes some ten seconds, and so does a restart.
_LEAST_LEFT_S = 60.0
# Cost of a restart, in times of the attempt's start: one for the new attempt's start and one for the old one's end.
_STARTS_A_RESTART = 2

Ask = Callable[[Path, dict[str, Any]], Preparation]


def ask_planner(work_dir: Path, question: dict[str, Any], start: Start = start_limited) -> Preparation:
    """Starts a planner process. Its files go to `work_dir`, which is created anew."""
    shutil.rmtree(work_dir, ignore_errors=True)
    work_dir.mkdir(parents=True)
    return Preparation([plan_step(work_dir, question)], work_dir=work_dir, start=start)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    job_id: str
    attempt: Attempt
    found: dict[str, Any]  # the current plan
    preparation: Preparation


class PlanCorrections:
    """Corrects one job's plan at a time."""

    def __init__(self, database: Database, settings: Settings, *, ask: Ask = ask_planner) -> None:
        self._database = database
        self._settings = settings
        self._ask = ask
        self._asked: _Asked | None = None

    def tend(self, job: Job) -> bool:
        """Advances the correction of a running job.

        Returns True if its attempt must end at its next commit, for a new plan.
        """
        if job.plan_number:
            found = load_plan(self._settings, job)
            return found is not None and (found["from_attempt"] or 0) > job.attempt
        asked = self._asked
        if asked is None:
            self._asked = self._ask_about(job)
        elif asked.job_id == job.id:
            self._poll(asked, job)
        return False

    def drop(self, *, keep: Collection[str]) -> None:
        """Ends the planner process of a job that no longer runs."""
        if self._asked is not None and self._asked.job_id not in keep:
            self._drop()

    # --- private methods --------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        if self._asked is not None:
            self._asked.preparation.stop()
            self._asked = None

    def _ask_about(self, job: Job) -> _Asked | None:
        """Starts the planner process. Returns None while there is nothing to correct."""
        if job.total_steps is None or not _NUM_FIRST_STEPS + MIN_STEPS <= job.step < job.total_steps:
            return None
        with self._database.read() as session:
            events = EventRepository(session)
            # One more row, because a resumed attempt may report the last step again.
            rows = events.first_metrics(job.id, job.attempt, limit=_NUM_FIRST_STEPS + MIN_STEPS + 1)
            began = events.first(job.id, job.attempt)
        steps = [row for row in rows if "step_s" in row.data]
        if began is None or len(steps) < _NUM_FIRST_STEPS + MIN_STEPS:
            return None
        num_left = job.total_steps - job.step
        if num_left * statistics.median(_step_s(row) for row in steps[_NUM_FIRST_STEPS:]) < _LEAST_LEFT_S:
            return None
        found, question = load_plan(self._settings, job), load_question(self._settings, job)
        if found is None or "placement" not in found or question is None:
            return None
        start_s = steps[0].created_at - _step_s(steps[0]) - began.created_at
        folder = job_dir(self._settings, job.id)
        running = {
            "timeline_dir": str(folder / FOLDER),
            "first_step": steps[_NUM_FIRST_STEPS].step,
            "found": {name: found[name] for name in ("plan", "placement", "arena_nbytes")},
            "num_steps_left": num_left,
            "restart_s": _STARTS_A_RESTART * max(0.0, start_s),
        }
        # The planner must not measure blocks while the job computes. It uses the job's own steps.
        question = {**question, "may_measure": False, "simulation_s": 0.0, "running": running}
        preparation = self._ask(folder / "correction", question)
        return _Asked(job_id=job.id, attempt=Attempt(job.attempt), found=found, preparation=preparation)

    def _poll(self, asked: _Asked, job: Job) -> None:
        if asked.attempt != job.attempt:  # another attempt has other steps and another start time
            self._drop()
            return
        try:
            results = asked.preparation.poll()
        except PreparationError as error:
            tell_warnings(self._database, job, asked.preparation)
            self._keep(job, _uncorrected(asked.found, str(error)))
        else:
            tell_warnings(self._database, job, asked.preparation)
            if results is not None:
                self._keep(job, _corrected(asked.found, results[PLAN_JOB], job.attempt))

    def _keep(self, job: Job, found: dict[str, Any]) -> None:
        """Stores the plan and names it in the job's row. A crash before that only repeats the correction."""
        self._drop()
        number = keep_plan(self._settings, job, found)
        with self._database.write() as session:
            JobRepository(session).set_fields(job.id, seen=job, plan_number=number)
            EventRepository(session).add(
                job.id,
                attempt=job.attempt,
                message=found["told"],
                level="info" if found["corrected"] else "warn",
                data={"plan_number": number, "step_s": found["plan"]["step_s"]},
            )


def _corrected(before: dict[str, Any], found: dict[str, Any], attempt: int) -> dict[str, Any]:
    if "told" not in found:
        return _uncorrected(before, "; ".join(found.get("warnings", ())))
    from_attempt = attempt + 1 if found["changes"] else None
    facts = {name: found[name] for name in ("plan", "placement", "arena_nbytes", "told")}
    return {**facts, **made_for(before), "corrected": True, "from_attempt": from_attempt}


def _uncorrected(before: dict[str, Any], why: str) -> dict[str, Any]:
    told = f"The plan could not be made again by what the first steps measured, and stays: {why}"
    return {**before, "corrected": False, "from_attempt": None, "told": told}


def _step_s(row: JobMetrics) -> float:
    return float(row.data["step_s"])
