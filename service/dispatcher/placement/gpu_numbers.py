"""The queue's policy about jobs whose plans choose the number of GPUs: whether a job begins with fewer than it prefers.

It only computes; it reads no clock and does no I/O. The rule: docs/decisions/0041-several-gpus.md.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from windlass.service.dispatcher.placement.placement_policy import BoxState, Candidate, Option, Placement, place
from windlass.service.dispatcher.placement.queue_policy import Amounts, missing, total


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOption:
    """A number of GPUs that a queued job may begin with."""

    gpus: int
    needs: Amounts
    run_s: float  # predicted seconds from the begin of its attempt to the job's end


def place_with_gpus(
    boxes: Sequence[BoxState],
    queued: Sequence[Candidate],
    *,
    box: str,
    fewer: Mapping[str, Sequence[GpuOption]],
) -> tuple[Sequence[Placement], Mapping[str, int]]:
    """Decides about each queued job, as `place` does, and lets some begin on `box` with fewer GPUs than they prefer.

    Only a job that waits for this box does so, or one that never fits it with the number that it prefers. It must then
    end sooner than by waiting; a wait without a prediction counts as endless. It keeps its number while jobs pause for
    it, and while it waits only so that a job before it is not delayed. It delays no job before it, as no job does.

    `fewer`: the other numbers of the jobs that may have them. Their option for the box is that of the preferred number.

    Returns the placements, and the number of each job that begins with another one than it prefers.
    """
    queued, begin_with = list(queued), dict[str, int]()
    placements = place(boxes, queued)
    if not fewer:
        return placements, begin_with
    state = next(each for each in boxes if each.name == box)
    taken = Counter(total(holder.takes for holder in state.holders))  # also by the jobs that begin before the next one
    for index, job in enumerate(queued):
        placement, decision = placements[index], placements[index].decision
        if placement.box == box and decision.begins:
            taken.update(next(option.needs for option in job.options if option.box == box))
        waits = job.is_ready and _waits_for(placement, box) and not placement.passes and not decision.begins
        if not waits or decision.waits_behind is not None or decision.pauses or decision.will_pause:
            continue
        end_s = math.inf if placement.end_s is None else placement.end_s
        for option in sorted(fewer.get(job.job_id, ()), key=lambda option: (option.run_s, option.gpus)):
            if option.run_s >= end_s:
                break
            if missing(state.has, taken, option.needs):
                continue
            changed = _with(job, box, option)
            then = place(boxes, [*queued[:index], changed])[index]  # later jobs change nothing for it
            if then.box == box and then.decision.begins:
                queued[index] = changed
                placements = place(boxes, queued)
                taken.update(option.needs)
                begin_with[job.job_id] = option.gpus
                break
    return placements, begin_with


def _waits_for(placement: Placement, box: str) -> bool:
    """Returns whether a job waits for a box, or for another one because it can never begin on this one."""
    here = placement.elsewhere.get(box)
    return placement.box == box or (here is not None and here.never)


def _with(job: Candidate, box: str, gpus: GpuOption) -> Candidate:
    """Returns the job with another number of GPUs on the box."""
    changed = Option(box=box, needs=gpus.needs, run_s=gpus.run_s)
    return replace(job, options=[changed if option.box == box else option for option in job.options])
