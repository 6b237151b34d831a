"""The parts of jobs over several boxes that this box has: it serves the attempts that the head wants.

The head begins and ends attempts. A box's part of an attempt ends by itself when the head's box has ended it, or is
lost. Its row says how far it is; the agent tells the head.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from windlass.actors.job import last_error
from windlass.service.data import remove_arenas
from windlass.service.dispatcher import AttemptWatch, Runners, have_exited
from windlass.service.dispatcher.parts.links import link_config, move_of
from windlass.service.installation import Settings, about
from windlass.service.jobs import MachineResources, build_stage_spec, job_dir, stages_of
from windlass.service.machine.fleet import JobContent, PartLink, taken_file
from windlass.storage.ids import Attempt, JobId
from windlass.storage.sql import Database, Job, JobPart
from windlass.storage.sql.repositories import HELD_FOR_PART, PartRepository, PartState, holds, job_of_row

_LOG = logging.getLogger(__name__)

# Seconds for a runner to end by itself when the head wants another attempt, or none. It waits as long for a lost box.
_KILL_AFTER_S = 120.0


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
    _ending: dict[tuple[str, int], AttemptWatch] = field(default_factory=dict)  # by job and attempt
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
            if holds(part):
                self._why_hold = HELD_FOR_PART
            try:
                if part.state == PartState.RUNNING.value:
                    self._watch(part)
                elif part.state == PartState.READY.value and self._may_begin(part):
                    self._begin(part)
            except Exception:  # noqa: BLE001  # one part's error must not stop the others
                _LOG.exception("its part could not be served; it is tried again", extra=about(part.job_id))

    @staticmethod
    def _is_wanted(part: JobPart) -> bool:
        """Returns whether the head wants an attempt, now or soon, that this box has not served."""
        return part.attempt > part.served and not part.is_over

    def _may_begin(self, part: JobPart) -> bool:
        """Returns whether a wanted attempt may begin. Without a link, the box is only reserved for it."""
        return self._is_wanted(part) and part.link is not None and not self.is_busy()

    def _begin(self, part: JobPart) -> None:
        with self.database.write() as session:  # first, so that what has begun is cleaned up
            if not PartRepository(session).begin(part.job_id, self.node, part.attempt):
                return
        job_id = JobId(part.job_id)
        try:
            job = self._job_of(part)
            link, stages = PartLink.model_validate(part.link), stages_of(self.settings, job_id)
            if link.move is not None:
                move = move_of(self.settings, self.resources, job, link.move)
                self.runners.start_move(move, link_config(self.settings, link, move.box))
            elif stages is None:
                raise ValueError("its plan over the boxes cannot be read")
            else:
                spec = build_stage_spec(self.settings, self.resources, job, stages, part.position)
                self.runners.start_part(spec, link_config(self.settings, link, part.position))
        except Exception as error:  # noqa: BLE001  # any error here is this part's error
            _LOG.exception("its part could not be started", extra=about(job_id, part.attempt))
            self._tell(part, PartState.RUNNING, served=part.attempt, told=str(error) or repr(error))
            self.runners.kill(job_id, Attempt(part.attempt))
        else:
            _LOG.info("part %d was launched", part.position, extra=about(job_id, part.attempt))

    def _watch(self, part: JobPart) -> None:
        attempt, now = Attempt(part.served), self.clock()
        is_wanted = part.attempt == part.served and not part.is_over
        if is_wanted and self.runners.is_alive(JobId(part.job_id), attempt):
            return
        ending = self._ending.setdefault((part.job_id, part.served), AttemptWatch(attempt=attempt))
        if not is_wanted:
            ending.kill_at = min(ending.kill_at, now if part.is_over else now + _KILL_AFTER_S)
        if not have_exited(self.runners, self.settings, part.job_id, ending, now):
            return
        del self._ending[part.job_id, part.served]
        remove_arenas()
        told = part.told or (last_error(job_dir(self.settings, part.job_id), attempt) if is_wanted else None)
        self._tell(part, PartState.READY, served=part.served, told=told)

    def _job_of(self, part: JobPart) -> Job:
        text = taken_file(self.settings.home, part.job_id).read_text()
        return job_of_row(JobContent.model_validate_json(text).row, attempt=part.attempt)

    def _tell(self, part: JobPart, state: PartState, *, served: int, told: str | None = None) -> None:
        with self.database.write() as session:
            PartRepository(session).tell(part.job_id, self.node, state=state, served=served, told=told)
