"""The resources whose doubling would shorten a step."""

from dataclasses import replace
from typing import Any

from windlass.planner.feasibility import with_part
from windlass.planner.hardware import limit_in_words, that_compute_faster, with_more_ssds
from windlass.planner.question import PlanQuestion
from windlass.planner.solver import (
    DoesNotFitError,
    PlannedJob,
    Solution,
    search,
)

# Minimum share by which a change must shorten a step to be worth mentioning.
WORTH = 0.05
# Share of a step by which the best plan may be shorter than the one that is found: steps are told in whole percent.
_NEAR = 0.01


def what_is_faster(question: PlanQuestion, job: PlannedJob, solution: Solution) -> list[str]:
    """Estimates the gain from twice as much of each resource by the cost model, and tells the largest first."""
    hardware, solution = question.hardware, _least_bound(question, job, solution)
    ssds, host, gpus, pcie = hardware.ssds, hardware.host, hardware.gpus, hardware.pcie
    more_ssds = with_more_ssds(hardware, ssds.count).ssds
    twice: dict[str, dict[str, Any]] = {
        f"twice as many SSDs{limit_in_words(ssds, more_ssds)}": {"ssds": more_ssds},
        "twice the host memory": {"host": with_part(host, memory_gib=2 * host.memory_gib)},
        "host memory that is twice as fast": {"host": with_part(host, memory_gb_per_s=2 * host.memory_gb_per_s)},
        "a CPU that updates twice as fast": {"host": with_part(host, adam_params_per_s=2 * host.adam_params_per_s)},
        f"a {'GPU' if question.has_gpu else 'CPU'} that computes twice as fast": {"gpus": that_compute_faster(gpus, 2)},
    }
    if question.has_gpu:  # a CPU has no link, and its memory is the host's
        twice["twice the GPU memory"] = {"gpus": with_part(gpus, memory_gib=2 * gpus.memory_gib)}
        twice["a link twice as fast"] = {
            "pcie": with_part(
                pcie,
                h2d_gb_per_s=2 * pcie.h2d_gb_per_s,
                d2h_gb_per_s=2 * pcie.d2h_gb_per_s,
                duplex_gb_per_s=None if pcie.duplex_gb_per_s is None else 2 * pcie.duplex_gb_per_s,
            )
        }
    told = list[tuple[float, str]]()
    for words, update in twice.items():
        changed = with_part(hardware, **update)
        faster = replace(question, hardware=changed)
        speedup = changed.gpus.tflops / gpus.tflops
        faster_job = job if speedup == 1 else replace(job, model=job.model.sped_up(speedup))
        try:
            # By the cost model alone. Most changes are excluded by bounds, without a solution.
            other = search(
                (faster_job,), faster.speeds, faster.limits, below=(1 - WORTH) * solution.cost, worth=_NEAR
            ).best
        except DoesNotFitError:  # it fits here, so it fits there; but no plan is worth mentioning
            continue
        if other.step_s < (1 - WORTH) * solution.step_s:
            share = 1 - other.step_s / solution.step_s
            told.append((share, f"with {words} a step takes about {share:.0%} less"))
    return [words for _, words in sorted(told, reverse=True)]


def _least_bound(question: PlanQuestion, job: PlannedJob, solution: Solution) -> Solution:
    """Returns the best plan by the cost model: with other hardware, too, the plans are compared by it.

    The job's own plan may have been chosen because it waits less.
    """
    try:
        return search((job,), question.speeds, question.limits, below=solution.cost, worth=_NEAR).best
    except DoesNotFitError:
        return solution
