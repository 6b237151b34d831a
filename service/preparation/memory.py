"""Admits the processes of preparations by the memory that is free beside what runs, and limits each to its share."""

from collections.abc import Callable
from dataclasses import dataclass

import psutil

from windlass.amounts import bytes_text
from windlass.service.preparation.pipeline import DOWNLOAD_MODEL, LEAST_MEMORY_NBYTES, PREPARE_DATA, PreparationStep
from windlass.service.preparation.sandbox import LimitedProcess

_GIB = 1024**3
# What steps get at most that need not hold a model. Of data: see `engine.example_bounds` for what one example may take.
# A download may go on for hours, and keeps what it is granted from other jobs.
_MOST_NBYTES = {PREPARE_DATA: 4 * _GIB, DOWNLOAD_MODEL: 4 * _GIB}
# What is left free for jobs, which take memory as they go on.
_RESERVE = 0.05  # of the machine's memory


@dataclass(slots=True, kw_only=True)
class _Grant:
    owner: str | None
    nbytes: int
    process: Callable[[], LimitedProcess | None]


class PreparationMemory:
    """The memory that was granted to the processes of preparations, by job."""

    def __init__(self, free_nbytes: Callable[[], int] | None = None, total_nbytes: int | None = None) -> None:
        self._free_nbytes = free_nbytes or (lambda: psutil.virtual_memory().available)
        self._total_nbytes = psutil.virtual_memory().total if total_nbytes is None else total_nbytes
        self._granted: dict[str, _Grant] = {}

    def grant(
        self,
        job_id: str,
        owner: str | None,
        step: PreparationStep,
        process: Callable[[], LimitedProcess | None],
        *,
        is_box_free: bool,
    ) -> int | None:
        """Grant a step's process what it may take, in bytes; None where it has to wait for memory.

        An owner gets at most half of what is free and what the owner has already, so that something is left for all
        others. `process`: the one that runs for the job. Where nothing else runs, the step begins with the least it
        needs in any case: waiting would not help.
        """
        self._granted.pop(job_id, None)
        own_nbytes = sum(each.nbytes for each in self._granted.values() if each.owner == owner)
        free_nbytes = self.free_nbytes()
        share_nbytes = max(0, free_nbytes + own_nbytes) // 2 - own_nbytes
        most_nbytes = _MOST_NBYTES.get(step.name, self._total_nbytes // 2)
        nbytes = min(most_nbytes, share_nbytes)
        if nbytes < LEAST_MEMORY_NBYTES:
            if self._granted or not is_box_free:
                return None
            nbytes = LEAST_MEMORY_NBYTES
        self._granted[job_id] = _Grant(owner=owner, nbytes=nbytes, process=process)
        return nbytes

    def free_nbytes(self) -> int:
        """What nobody has taken yet, and nobody was granted."""
        promised = sum(max(0, each.nbytes - _resident_nbytes(each.process())) for each in self._granted.values())
        return int(self._free_nbytes() - promised - _RESERVE * self._total_nbytes)

    def why_not(self) -> str:
        """Tell why a step has to wait."""
        free = bytes_text(max(0, self.free_nbytes()))
        return f"memory for its preparation: {bytes_text(2 * LEAST_MEMORY_NBYTES)} needed, {free} free beside what runs"

    def give_back(self, job_id: str) -> None:
        """Forget what a job's process was granted: it has ended."""
        self._granted.pop(job_id, None)


def _resident_nbytes(process: LimitedProcess | None) -> int:
    if process is None or process.pid is None:
        return 0
    try:
        return int(psutil.Process(process.pid).memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0
