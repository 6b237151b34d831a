"""Plans of queued jobs for kinds of boxes that joined after the jobs were prepared, in a planner process."""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.service.dispatcher.replanner import Ask
from windlass.service.installation import Settings, about
from windlass.service.jobs import BoxKind, keep_numbers, kind_dir, later_request
from windlass.service.preparation import PLAN_JOB, Preparation, PreparationError
from windlass.storage.sql import Job

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    job_id: str
    kind: str
    preparation: Preparation
    work_dir: Path


class BoxPlanner:
    """Makes one plan after the other. If this process ends, the next one begins the plan anew."""

    def __init__(self, settings: Settings, *, ask: Ask) -> None:
        self._settings = settings
        self._ask = ask
        self._running: _Running | None = None

    def poll(self, wanted: Sequence[tuple[Job, BoxKind]], *, may_begin: bool) -> str | None:
        """Goes on with a plan, or begins the first one that is wanted.

        Returns the id of a job that has another plan now. `may_begin`: no other planner runs here.
        """
        running = self._running
        if running is not None and (running.job_id, running.kind) not in {(job.id, kind.key) for job, kind in wanted}:
            self.close()
        elif running is not None:
            return self._poll(running)
        if wanted and may_begin:
            return self._begin(*wanted[0])
        return None

    def close(self) -> None:
        """Ends the planner process."""
        if self._running is not None:
            self._running.preparation.stop()
            self._running = None

    def _begin(self, job: Job, kind: BoxKind) -> str | None:
        try:
            request = later_request(self._settings, job, kind)
        except (OSError, ValueError, KeyError, AssertionError) as error:
            return self._give_up(job.id, kind.key, f"its request to the planner cannot be made: {error}")
        work_dir = kind_dir(self._settings, job.id, f"{kind.key}.partial")
        preparation = self._ask(work_dir, request)
        self._running = _Running(job_id=job.id, kind=kind.key, preparation=preparation, work_dir=work_dir)
        return None

    def _poll(self, running: _Running) -> str | None:
        try:
            results = running.preparation.poll()
        except PreparationError as error:
            self.close()
            return self._give_up(running.job_id, running.kind, str(error))
        if results is None:
            return None
        self.close()
        folder = kind_dir(self._settings, running.job_id, running.kind)
        shutil.rmtree(folder, ignore_errors=True)
        running.work_dir.rename(folder)
        keep_numbers(self._settings, running.job_id, {running.kind: results[PLAN_JOB]})
        return running.job_id

    def _give_up(self, job_id: str, kind: str, why: str) -> str:
        _LOG.warning("it gets no plan for boxes of kind %s: %s", kind, why, extra=about(job_id))
        answer: dict[str, Any] = {"error": {"message": why}}
        keep_numbers(self._settings, job_id, {kind: answer})
        return job_id
