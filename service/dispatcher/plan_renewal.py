"""Renewals of plans before a launch, if the machine or the settings have changed since the plan was made.

A job may wait or be paused for long. Meanwhile SSDs or GPUs may change and be measured again, or the settings give jobs
other budgets. A job's states can move to the places that a new plan requires. The new plan therefore holds from the
next attempt on.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from windlass.service.dispatcher.plan_corrections import Ask
from windlass.service.installation import Settings
from windlass.service.jobs import job_dir, keep_plan, load_plan, load_question, plan_bounds
from windlass.service.machine import measured_hardware
from windlass.service.preparation import PLAN_JOB, Preparation, PreparationError, tell_warnings
from windlass.storage.sql import Database, Job
from windlass.storage.sql.repositories import EventRepository, JobRepository


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    why: str
    now: dict[str, Any]  # the facts for which the new plan is made
    preparation: Preparation


class PlanRenewals:
    """Renews one job's plan at a time, because the planner takes all cores."""

    def __init__(self, database: Database, settings: Settings, *, ask: Ask) -> None:
        self._database = database
        self._settings = settings
        self._ask = ask
        self._asked: dict[str, _Asked | None] = {}  # None: the renewal is done, and the next pass launches the job

    @property
    def pending(self) -> Collection[str]:
        """The jobs whose plan is being renewed, or was renewed in this pass. They keep their place in the queue."""
        return self._asked.keys()

    def is_pending(self, job: Job) -> bool:
        """Returns whether a queued job must wait for a new plan, and starts the renewal.

        Returns False for a job without a plan.
        """
        asked = self._asked.get(job.id)
        if asked is not None:
            self._poll(asked, job)
            return True
        self._asked.pop(job.id, None)
        question, now = load_question(self._settings, job), self._now(job)
        if load_plan(self._settings, job) is None or question is None:
            return False
        changed = [name for name, value in now.items() if question.get(name, value) != value]
        if not changed:
            return False
        if not self._asked:
            why = "The machine was measured again" if "hardware" in changed else "The settings' budgets have changed"
            preparation = self._ask(job_dir(self._settings, job.id) / "renewal", {**question, **now})
            self._asked[job.id] = _Asked(why=why, now=now, preparation=preparation)
        return True

    def _now(self, job: Job) -> dict[str, Any]:
        """Returns the parts of a planner's question that may have changed by now."""
        hardware = measured_hardware(self._settings)
        measured = {} if hardware is None else {"hardware": hardware.model_dump()}
        return {**plan_bounds(self._settings, job), **measured}

    def drop(self, *, keep: Collection[str]) -> None:
        """Ends the renewals of jobs that are no longer queued."""
        for job_id in self._asked.keys() - set(keep):
            if (asked := self._asked.pop(job_id)) is not None:
                asked.preparation.stop()

    def _poll(self, asked: _Asked, job: Job) -> None:
        try:
            results = asked.preparation.poll()
        except PreparationError as error:
            tell_warnings(self._database, job, asked.preparation)
            self._keep(asked, job, None, str(error))
        else:
            tell_warnings(self._database, job, asked.preparation)
            if results is not None:
                found = results[PLAN_JOB]
                plan = found.get("plan", {"feasible": False, "reasons": found.get("warnings", [])})
                self._keep(asked, job, found if plan["feasible"] else None, "; ".join(plan["reasons"]))

    def _keep(self, asked: _Asked, job: Job, found: dict[str, Any] | None, why_not: str) -> None:
        """Stores the new plan, or the old plan with the new facts so that it is not renewed again."""
        self._asked[job.id] = None
        if found is not None:
            told = f"{asked.why}: the job goes on by a new plan"
            kept = {name: found[name] for name in ("plan", "placement", "arena_nbytes")}
        else:
            told = f"{asked.why}, but there is no new plan, and the one before stays: {why_not}"
            kept = load_plan(self._settings, job) or {}
        about = {"corrected": False, "from_attempt": job.attempt + 1, "told": told}
        number = keep_plan(self._settings, job, {**kept, **about, **asked.now})
        with self._database.write() as session:
            JobRepository(session).set_fields(job.id, seen=job, plan_number=number)
            EventRepository(session).add(
                job.id,
                attempt=job.attempt,
                message=told,
                level="info" if found is not None else "warn",
                data={"plan_number": number},
            )
