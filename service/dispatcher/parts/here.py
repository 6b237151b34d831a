"""The parts of jobs over several boxes that this box has: it serves the attempts that the head wants.

The head begins and ends attempts. A box's part of an attempt ends by itself when the head's box has ended it, or is
lost. Its row says how far it is; the agent tells the head.
"""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from windlass.actors.lifecycle import close_attempt, kill_attempt
from windlass.service.data import remove_arenas
from windlass.service.dispatcher import Runners
from windlass.service.dispatcher.parts.links import link_config
from windlass.service.installation import Settings, about
from windlass.service.jobs import MachineResources, build_stage_spec, job_dir, stages_of
from windlass.service.machine.fleet import JobContent, PartLink, taken_dir
from windlass.storage.ids import Attempt, JobId
from windlass.storage.sql import Database, Job, JobPart
from windlass.storage.sql.repositories import PartRepository, PartState, job_of_row

_LOG = logging.getLogger(__name__)

# Seconds for a runner to end by itself when the head wants another attempt, or none. It waits as long for a lost box.
_KILL_AFTER_S = 120.0
# Seconds for other actors to outlive their runner.
_KILL_ORPHANS_AFTER_S = 5.0


@dataclass(slots=True)
class PartsHere:
    """The parts of this box. Its memory may be lost at any time.

    `node`: this home. `clock`: monotonic.
    """

    database: Database
    settings: Settings
    runners: Runners
    resources: MachineResources
    node: str
    clock: Callable[[], float]
    is_busy: Callable[[], bool] = lambda: False  # processes of the box's own jobs live
    _kill_at: dict[tuple[str, int], float] = field(default_factory=dict)  # by job and attempt
    _why_hold: str | None = None

    @property
    def hold(self) -> str | None:
        """The reason why this box runs no jobs of its own, as the last `tick` found it; None: it has no part."""
        return self._why_hold

    def tick(self) -> None:
        """Begins the attempts that are wanted, and cleans up after those that have ended."""
        with self.database.read() as session:
            parts = PartRepository(session).on(self.node)
        self._why_hold = None
        for part in parts:
            if part.state == PartState.RUNNING.value or self._is_wanted(part):
                self._why_hold = "this box works on a part of a job over several boxes"
            try:
                if part.state == PartState.RUNNING.value:
                    self._watch(part)
                elif part.state == PartState.READY.value and self._is_wanted(part) and not self.is_busy():
                    self._begin(part)
            except Exception:  # noqa: BLE001  # one part's error must not stop the others
                _LOG.exception("its part could not be served; it is tried again", extra=about(part.job_id))

    @staticmethod
    def _is_wanted(part: JobPart) -> bool:
        """Returns whether the head wants an attempt that this box has not served."""
        return part.attempt > part.served and not part.is_over

    def _begin(self, part: JobPart) -> None:
        assert part.link is not None, "the head wants an attempt, and says how the boxes reach each other"
        with self.database.write() as session:  # first, so that what has begun is cleaned up
            if not PartRepository(session).begin(part.job_id, self.node, part.attempt):
                return
        job_id = JobId(part.job_id)
        try:
            job = self._job_of(part)
            stages = stages_of(self.settings, job_id)
            if stages is None:
                raise ValueError("its plan over the boxes cannot be read")
            spec = build_stage_spec(self.settings, self.resources, job, stages, part.position)
            self.runners.start_part(spec, link_config(self.settings, PartLink.model_validate(part.link), part.position))
        except Exception as error:  # noqa: BLE001  # any error here is this part's error
            _LOG.exception("its part could not be started", extra=about(job_id, part.attempt))
            self._tell(part, PartState.RUNNING, served=part.attempt, told=str(error) or repr(error))
            self.runners.kill(job_id, Attempt(part.attempt))
        else:
            _LOG.info("part %d was launched", part.position, extra=about(job_id, part.attempt))

    def _watch(self, part: JobPart) -> None:
        job, attempt, now = JobId(part.job_id), Attempt(part.served), self.clock()
        key, folder = (part.job_id, part.served), job_dir(self.settings, part.job_id)
        if self.runners.is_alive(job, attempt):
            if part.is_over or part.attempt != part.served:
                kill_at = self._kill_at.setdefault(key, now if part.is_over else now + _KILL_AFTER_S)
                if now >= kill_at:
                    self.runners.kill(job, attempt)
            return
        if not close_attempt(folder, attempt):
            kill_at = self._kill_at[key] = min(self._kill_at.get(key, math.inf), now + _KILL_ORPHANS_AFTER_S)
            if now >= kill_at and (killed := kill_attempt(folder, attempt)):
                _LOG.warning("processes %s outlived their runner and were killed", killed, extra=about(job, attempt))
            return
        self._kill_at.pop(key, None)
        remove_arenas()
        self._tell(part, PartState.READY, served=part.served, told=part.told)

    def _job_of(self, part: JobPart) -> Job:
        text = (taken_dir(self.settings.home) / f"{part.job_id}.json").read_text()
        return job_of_row(JobContent.model_validate(json.loads(text)).row, attempt=part.attempt)

    def _tell(self, part: JobPart, state: PartState, *, served: int, told: str | None = None) -> None:
        with self.database.write() as session:
            PartRepository(session).tell(part.job_id, self.node, state=state, served=served, told=told)
