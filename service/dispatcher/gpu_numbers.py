"""The queue's policy about jobs whose plans choose the number of GPUs: whether a job begins with fewer than it prefers.

It only computes; it reads no clock and does no I/O. The rule: docs/decisions/0041-several-gpus.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from windlass.service.dispatcher.queue_policy import Amounts, Decision, Holder, Queued, decide, missing, total


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOption:
    """A number of GPUs that a queued job may begin with."""

    gpus: int
    needs: Amounts
    lasts_s: float  # predicted seconds from the begin of its attempt to the job's end


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexibleJob:
    """A queued job with a plan for each number of GPUs."""

    preferred: GpuOption  # with the amounts that the job has in the queue
    others: Sequence[GpuOption]


def decide_with_gpus(
    has: Amounts,
    holders: Sequence[Holder],
    queued: Sequence[Queued],
    *,
    flexible: Mapping[str, FlexibleJob],
    ends_in_s: Mapping[str, float],
) -> tuple[Sequence[Decision], Mapping[str, int]]:
    """Decides about each queued job, as `decide` does, and lets flexible jobs begin with another number of GPUs.

    A job does so only if it then ends sooner, by its plans, than if it waited for the number that it prefers. It is not
    compared with a wait whose length follows from the order of the queue, or from jobs that pause for it. It delays no
    job before it, as no job does.

    `ends_in_s`: seconds until a job would end that runs now or begins now. A job without one counts as endless.

    Returns the decisions, and the other number of each job that begins with one.
    """
    queued, begin_with = list(queued), dict[str, int]()
    decisions = decide(has, holders, queued)
    for index, job in enumerate(queued):
        choices, decision = flexible.get(job.job_id), decisions[index]
        may_help = job.is_ready and not decision.begins and decision.waits_behind is None
        if choices is None or not may_help or decision.pauses or decision.will_pause:
            continue
        begun = [other for other, one in zip(queued[:index], decisions[:index], strict=True) if one.begins]
        present = [(holder.takes, _end_of(holder, ends_in_s)) for holder in holders]
        present += [(other.needs, _lasts_s(other, flexible, begin_with, ends_in_s)) for other in begun]
        waits_s = least_wait_s(has, present, job.needs)
        for option in sorted(choices.others, key=lambda option: (option.lasts_s, option.gpus)):
            if option.lasts_s >= waits_s + choices.preferred.lasts_s:
                break
            changed = [*queued[:index], replace(job, needs=option.needs), *queued[index + 1 :]]
            then = decide(has, holders, changed)
            if then[index].begins:
                queued, decisions = changed, then
                begin_with[job.job_id] = option.gpus
                break
    return decisions, begin_with


def least_wait_s(has: Amounts, present: Sequence[tuple[Amounts, float]], needs: Amounts) -> float:
    """Returns the least seconds until `needs` are free, if no other job begins meanwhile. It is infinite if never.

    `present`: the amounts that each job holds, and the seconds until it ends.
    """
    for after_s in sorted({0.0, *(ends_s for _, ends_s in present)}):
        left = [takes for takes, ends_s in present if ends_s > after_s]
        if math.isfinite(after_s) and not missing(has, total(left), needs):
            return after_s
    return math.inf


def _end_of(holder: Holder, ends_in_s: Mapping[str, float]) -> float:
    """Returns when a holder's resources are free. A job that leaves, or is overdue, counts as about to end."""
    return 0.0 if holder.is_leaving else max(0.0, ends_in_s.get(holder.job_id, math.inf))


def _lasts_s(
    job: Queued, flexible: Mapping[str, FlexibleJob], begin_with: Mapping[str, int], ends_in_s: Mapping[str, float]
) -> float:
    """Returns the seconds that a job takes that begins now."""
    if (choices := flexible.get(job.job_id)) is None:
        return ends_in_s.get(job.job_id, math.inf)
    gpus = begin_with.get(job.job_id, choices.preferred.gpus)
    return next(option.lasts_s for option in (choices.preferred, *choices.others) if option.gpus == gpus)
