"""Faults of boxes and of the network in a simulated job: what they cost, and the commit from which the job goes on."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from windlass.actors.job import box_of
from windlass.planner.simulation import SimulatedBox, SimulatedJob
from windlass.storage.ids import Attempt, Rank, Step
from windlass.storage.link import LinkSettings
from windlass.storage.store import CommitRecord, Decision, StoreJournal, recover

_ATTEMPT = Attempt(1)
# Number of simulation events between two checks for the end of the job.
_LOOK_EVERY = 1000
# Two boxes, the smaller index first.
_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCut:
    """The connection of two boxes is cut at a time after the start, for some seconds."""

    one: int
    other: int
    at_s: float
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLost:
    """A box ends without a message, as in a power failure. Its SSDs keep what was committed."""

    box: int
    at_s: float


Fault = LinkCut | BoxLost


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultedRun:
    """The simulated attempt."""

    step_ends_s: tuple[float, ...]  # of the backward passes of its steps
    lost_s: float | None  # the time at which the attempt ended by a fault; None: it went on to its last step
    resumes_after: int  # the committed step after which the next attempt goes on, or the last step


def slowed(box: SimulatedBox, factor: float) -> SimulatedBox:
    """Returns a box whose compute, copies, SSDs and updates take `factor` times as long."""
    rates, work = box.rates, box.work
    return replace(
        box,
        rates=replace(
            rates,
            h2d_bytes=rates.h2d_bytes / factor,
            d2h_bytes=rates.d2h_bytes / factor,
            ssd_read_bytes=tuple(rate / factor for rate in rates.ssd_read_bytes),
            ssd_write_bytes=tuple(rate / factor for rate in rates.ssd_write_bytes),
            optimizer_params=rates.optimizer_params / factor,
            device_params=rates.device_params / factor,
            device_rounded_params=rates.device_rounded_params / factor,
            device_added_params=rates.device_added_params / factor,
            host_memory_bytes=rates.host_memory_bytes / factor,
            commit_s=rates.commit_s * factor,
        ),
        work=replace(
            work,
            compute_s={key: seconds * factor for key, seconds in work.compute_s.items()},
            norms_s={block: seconds * factor for block, seconds in work.norms_s.items()},
        ),
    )


def run_with_faults(job: SimulatedJob, faults: Sequence[Fault], *, silence_s: float | None = None) -> FaultedRun:
    """Runs a job over boxes that was just made, in which faults occur.

    `silence_s`: the time without an answer after which a box is lost; None: that of the link.

    Raises:
        Stuck: the job neither ends nor loses a box. That would be a defect of the policy or the simulation.
    """
    attempt = _Attempt(job, LinkSettings().silence_s if silence_s is None else silence_s)
    for fault in faults:
        attempt.schedule(fault)
    return attempt.run()


class _Attempt:
    """A job, with what its boxes notice of faults."""

    def __init__(self, job: SimulatedJob, silence_s: float) -> None:
        assert job.network is not None, "faults are those of several boxes"
        self._job, self._network, self._silence_s = job, job.network, silence_s
        self._lost_s: float | None = None
        self._died_s: dict[int, float] = {}  # by box
        self._num_cuts: Counter[_Pair] = Counter()  # that last now
        self._num_restored: Counter[_Pair] = Counter()

    def schedule(self, fault: Fault) -> None:
        clock = self._job.clock
        if isinstance(fault, LinkCut):
            pair = (min(fault.one, fault.other), max(fault.one, fault.other))
            clock.after(fault.at_s, functools.partial(self._cut, pair))
            clock.after(fault.at_s + fault.duration_s, functools.partial(self._restore, pair))
        else:
            clock.after(fault.at_s, functools.partial(self._lose, fault.box))

    def run(self) -> FaultedRun:
        job = self._job
        while self._lost_s is None and not job.is_finished and job.clock.run(max_calls=_LOOK_EVERY):
            pass
        if self._lost_s is None and not job.is_finished:
            raise job.stuck()
        return FaultedRun(step_ends_s=tuple(job.step_ends_s), lost_s=self._lost_s, resumes_after=self._resumes_after())

    def _cut(self, pair: _Pair) -> None:
        self._network.cut(*pair)
        self._num_cuts[pair] += 1
        if self._num_cuts[pair] == 1:
            lose = functools.partial(self._hear_nothing, pair, self._num_restored[pair])
            self._job.clock.after(self._silence_s, lose)

    def _restore(self, pair: _Pair) -> None:
        self._network.restore(*pair)
        self._num_cuts[pair] -= 1
        self._num_restored[pair] += not self._num_cuts[pair]

    def _lose(self, box: int) -> None:
        self._died_s.setdefault(box, self._job.clock.now)
        if box == 0:
            self._end()  # with its scheduler
        for pair in itertools.combinations(range(self._job.num_boxes), 2):
            if box in pair:
                self._cut(pair)

    def _hear_nothing(self, pair: _Pair, num_restored: int) -> None:
        """Ends the attempt, if two boxes have had no connection since it was restored so many times."""
        if self._num_restored[pair] == num_restored:
            self._end()

    def _end(self) -> None:
        if self._lost_s is None and not self._job.is_finished:
            self._lost_s = self._job.clock.now
            self._job.clock.pause()

    def _resumes_after(self) -> int:
        """Returns the commit that the next attempt finds on all SSDs, by the rules of real jobs."""
        ended_s = math.inf if self._lost_s is None else self._lost_s
        records = {ssd: [_record(Step(0))] for ssd in self._job.ssd_servers}
        for commit in self._job.commits:
            if commit.at_s <= min(ended_s, self._died_s.get(box_of(commit.ssd), math.inf)):
                records[commit.ssd].append(_record(commit.step))
        journals = [StoreJournal(where=ssd, records=tuple(each)) for ssd, each in records.items()]
        found = recover(journals, Decision.of(_record(Step(self._job.committed)))).resume_from
        return 0 if found is None else found.step


def _record(step: Step) -> CommitRecord:
    """Returns a journal's entry for a commit."""
    return CommitRecord(
        sequence=step,
        step=step,
        attempt=_ATTEMPT,
        rank=Rank(0),
        manifest=0,
        manifest_digest=0,
        trainer_state="",
    )
