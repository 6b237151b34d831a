"""Admits processes of preparations if enough memory is free, and limits each process to its share."""

from collections.abc import Callable
from dataclasses import dataclass

import psutil

from windlass.amounts import bytes_text
from windlass.service.preparation.pipeline import LEAST_MEMORY_NBYTES
from windlass.service.preparation.sandbox import LimitedProcess
from windlass.service.preparation.steps import DOWNLOAD_MODEL, PREPARE_DATA, PreparationStep

_GIB = 1024**3
# Maximum bytes for steps that do not hold a model. For data, `engine.data` limits the size of one example. A download
# may take hours, and other jobs cannot use its share meanwhile.
_MOST_NBYTES = {PREPARE_DATA: 4 * _GIB, DOWNLOAD_MODEL: 4 * _GIB}
# Share of the machine's memory that stays free for jobs, because their use grows.
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
        """Grants memory to a step's process and returns the bytes, or returns None if it must wait.

        An owner gets at most half of the free memory and of the owner's present grants, so that other owners can get
        some. `process` returns the job's running process. If nothing else runs, the step gets at least the minimum,
        because waiting would not help.
        """
        self._granted.pop(job_id, None)
        own_nbytes = self._own_nbytes(owner)
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
        """Returns the free memory minus unused grants and the reserve."""
        promised = sum(max(0, each.nbytes - _resident_nbytes(each.process())) for each in self._granted.values())
        return int(self._free_nbytes() - promised - _RESERVE * self._total_nbytes)

    def why_not(self, owner: str | None) -> str:
        """Explains why the next step of an owner must wait."""
        own_nbytes = self._own_nbytes(owner)
        needed = bytes_text(2 * LEAST_MEMORY_NBYTES + own_nbytes)  # `grant` gives the minimum from here on
        free = bytes_text(max(0, self.free_nbytes()))
        if own_nbytes:
            return (
                f"another preparation of its owner to end, which may use {bytes_text(own_nbytes)} of memory; it begins "
                f"beside that one once {needed} are free, and {free} are"
            )
        return f"memory for its preparation: {needed} needed, {free} free beside what runs"

    def give_back(self, job_id: str) -> None:
        """Releases the grant of a job whose process has ended."""
        self._granted.pop(job_id, None)

    def _own_nbytes(self, owner: str | None) -> int:
        return sum(grant.nbytes for grant in self._granted.values() if grant.owner == owner)


def _resident_nbytes(process: LimitedProcess | None) -> int:
    if process is None or process.pid is None:
        return 0
    try:
        return int(psutil.Process(process.pid).memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0
