"""Plans that are made again before a job is launched, as its machine is not any more what they were made for.

A job may wait or be paused for long; meanwhile SSDs or GPUs are changed, and the machine is measured again. An attempt
goes on wherever its plan has things rest, so the new plan holds from the next attempt on.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from windlass.planner.hardware import Hardware
from windlass.service.doctor import measured_hardware
from windlass.service.job_plans import keep_plan, load_plan, load_question
from windlass.service.job_specs import job_dir
from windlass.service.plan_corrections import Ask
from windlass.service.preparation import PLAN_JOB, Preparation, PreparationError
from windlass.service.settings import Settings
from windlass.storage.sql.database import Database
from windlass.storage.sql.events import EventRepository
from windlass.storage.sql.jobs import JobRepository
from windlass.storage.sql.models import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    hardware: Hardware
    preparation: Preparation


class PlanRenewals:
    """One job's plan is renewed at a time: the planner takes all cores."""

    def __init__(self, database: Database, settings: Settings, *, ask: Ask) -> None:
        self._database = database
        self._settings = settings
        self._ask = ask
        self._asked: dict[str, _Asked | None] = {}  # None: answered, and the job is launched by the next pass

    @property
    def pending(self) -> Collection[str]:
        """Jobs whose plan is being made, or was by this pass: they keep their place."""
        return self._asked.keys()

    def is_pending(self, job: Job) -> bool:
        """Whether a queued job has to wait for a plan; begins to make it. False for a job that never had one."""
        asked = self._asked.get(job.id)
        if asked is not None:
            self._poll(asked, job)
            return True
        self._asked.pop(job.id, None)
        question, hardware = load_question(self._settings, job), measured_hardware(self._settings)
        if load_plan(self._settings, job) is None or question is None or hardware is None:
            return False
        if question.get("hardware") in (None, hardware.model_dump()):
            return False
        if not self._asked:
            question = {**question, "hardware": hardware.model_dump()}
            preparation = self._ask(job_dir(self._settings, job.id) / "renewal", question)
            self._asked[job.id] = _Asked(hardware=hardware, preparation=preparation)
        return True

    def drop(self, *, keep: Collection[str]) -> None:
        """End what was begun for a job that is not queued any more."""
        for job_id in self._asked.keys() - set(keep):
            if (asked := self._asked.pop(job_id)) is not None:
                asked.preparation.stop()

    def _poll(self, asked: _Asked, job: Job) -> None:
        try:
            results = asked.preparation.poll()
        except PreparationError as error:
            self._keep(asked, job, None, str(error))
        else:
            if results is not None:
                found = results[PLAN_JOB]
                plan = found.get("plan", {"feasible": False, "reasons": found.get("warnings", [])})
                self._keep(asked, job, found if plan["feasible"] else None, "; ".join(plan["reasons"]))

    def _keep(self, asked: _Asked, job: Job, found: dict[str, Any] | None, why_not: str) -> None:
        """What comes of it: another plan, or the one before for this machine too, so that it is not asked for again."""
        self._asked[job.id] = None
        if found is not None:
            told = "The machine was measured again: the job goes on by a new plan"
            kept = {name: found[name] for name in ("plan", "placement", "arena_nbytes")}
        else:
            told = f"The machine was measured again, but there is no new plan, and the one before stays: {why_not}"
            kept = load_plan(self._settings, job) or {}
        about = {"corrected": False, "from_attempt": job.attempt + 1, "told": told}
        number = keep_plan(self._settings, job, {**kept, **about, "hardware": asked.hardware.model_dump()})
        with self._database.write() as session:
            JobRepository(session).set_fields(job.id, seen=job, plan_number=number)
            EventRepository(session).add(
                job.id,
                attempt=job.attempt,
                message=told,
                level="info" if found is not None else "warn",
                data={"plan_number": number},
            )
