"""Simulates a job on a machine that need not exist, with discrete events and without any data.

The scheduler's policy, the plan's slots and the cache of params are the real ones. The other actors are simulated chunk
by chunk, as far as they use resources: compute, the two directions of the link, each SSD, each optimizer. A resource
does one thing at a time, at its rate. The result has the spans that real actors would report. It has the timeline that
follows from them, and the memory in use on each tier.
"""

import gc
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter

from windlass.actors.job import CoreContext
from windlass.actors.messages import SpanKind
from windlass.actors.policy import SchedulerConfig
from windlass.actors.timeline import StepSpans, Timeline
from windlass.amounts import bytes_text
from windlass.planner.simulation.job import Pending, SimulatedBox, SimulatedJob
from windlass.planner.simulation.network import NetworkRates
from windlass.planner.simulation.resources import Rates, Stuck, TooLong, Work

__all__ = ["Rates", "Stuck", "TooLong", "Work", "simulate", "steady_step_s"]

# Maximum number of steps to simulate. The first step differs from the others, because none precedes it.
_MOST_STEPS = 6
# Relative difference to the previous step, up to which a step is steady.
_STEADY = 0.01
# Share of a step: times that differ by less count as the same.
_SAME = 1e-4
# Rounds of groups that are simulated of a step with many. In the first one, updates of the step before end. In the last
# one, gradients are completed. Those between are equal, as soon as two are.
_FEW_ROUNDS, _MANY_ROUNDS = 4, 6


def simulate(
    context: CoreContext,
    shape: SchedulerConfig,
    rates: Rates,
    work: Work,
    *,
    is_late: Callable[[], bool] = lambda: False,
    others: Sequence[SimulatedBox] = (),
    network: NetworkRates | None = None,
) -> list[StepSpans]:
    """Returns the timelines of all steps of a job, as the real job would report them. Evaluations are left out.

    Each one has the memory levels of its period. Those of the last step continue until all is committed. `is_late` is
    called often, and says whether the simulation has exceeded its time limit. `others` and `network`: see
    `SimulatedJob`.

    Raises:
        ValueError: the rates are for another number of SSDs, or the swapped bytes do not match the plan.
        Stuck: the job does not end. That would be a defect of the policy, the plan or this simulation.
        TooLong: `is_late` returned true.
    """
    shape = replace(shape, num_evaluation_groups=0)
    job = _job(context, shape, rates, work, others=others, network=network)
    all_spans = job.run(is_late)
    levels = job.levels
    timeline = Timeline(
        shape.num_blocks,
        keeps_grads=shape.keeps_grads,
        overlaps_steps=shape.ordering.overlaps_steps,
        max_spans=len(all_spans),
        boxes=context.spec.names_of_boxes,
    )
    timeline.begin(0.0)
    spans, num_reported = sorted(all_spans, key=attrgetter("end_s")), 0
    # Actors report a step while the next one runs. The last of several groups of micro-batches ends a step.
    ends = {span.step: span.end_s for span in spans if span.kind is SpanKind.BACKWARD and span.block == 0}
    steps = []
    for step in range(1, shape.total_steps + 1):
        num_known = bisect_right(spans, ends[step + 1], key=attrgetter("end_s")) if step + 1 in ends else len(spans)
        timeline.add(spans[num_reported:num_known])
        num_reported = num_known
        ended = timeline.end_step(step)
        assert ended is not None, f"the simulated job has no step {step}"
        until_s = ended.end_s if step < shape.total_steps else math.inf
        steps.append(replace(ended, levels=tuple(level.between(ended.start_s, until_s) for level in levels)))
    return steps


def steady_step_s(
    context: CoreContext,
    shape: SchedulerConfig,
    rates: Rates,
    work: Work,
    *,
    others: Sequence[SimulatedBox] = (),
    network: NetworkRates | None = None,
    max_calls: int | None = None,
    most_s: float = math.inf,
) -> float:
    """Returns the step time in steady state, whatever the number of steps of the job.

    `others` and `network`: see `SimulatedJob`. `max_calls`: the most events of a step. `most_s`: if the step takes
    longer, some time above this may be returned in place of the step's.

    Raises:
        ValueError, Stuck: as `simulate`.
        TooLong: a step has more than `max_calls` events.
    """
    # One step more than is measured, because the end of a job commits everything.
    shape = replace(shape, num_evaluation_groups=0, total_steps=_MOST_STEPS + 1)
    with _without_collections():
        num_left_out = 0 if others else _num_rounds_to_leave_out(context)
        if num_left_out:
            fewer = _without_rounds(context, num_left_out)
            job = _job(fewer, replace(shape, num_groups=fewer.plan.num_groups), rates, work, keeps_spans=False)
            period_s = _steady_period_s(job, max_calls)
            (*_, first_s, second_s, third_s, _) = job.round_ends_s
            round_s = third_s - second_s
            if abs(second_s - first_s - round_s) <= _SAME * round_s:
                return period_s + num_left_out * round_s
        job = _job(context, shape, rates, work, keeps_spans=False, others=others, network=network)
        return _steady_period_s(job, max_calls, most_s)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Stops Python's collector of cycles for as long as a simulation takes.

    It would look at all objects of the process several times, a sixth of the time of a simulation. What a simulation
    drops is in no cycle, so its memory does not grow (`test_a_simulated_step_leaves_no_cycles`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _num_rounds_to_leave_out(context: CoreContext) -> int:
    """Returns how many rounds of groups in the middle of a step need not be simulated. Lanes make rounds unequal."""
    num_rounds = -(-context.plan.num_groups // context.spec.num_ranks)
    if num_rounds < _MANY_ROUNDS or context.spec.training.lane_division.num_lanes > 1:
        return 0
    return num_rounds - _FEW_ROUNDS


def _without_rounds(context: CoreContext, number: int) -> CoreContext:
    """Returns the job with so many full rounds of groups fewer in a step, and with the same buffers."""
    plan, training = context.plan, context.spec.training
    num_groups = number * context.spec.num_ranks
    training = replace(training, num_microbatches=training.num_microbatches - num_groups * plan.group_size)
    return replace(
        context,
        spec=replace(context.spec, training=training),
        plan=replace(plan, num_groups=plan.num_groups - num_groups),
    )


def _steady_period_s(job: SimulatedJob, max_calls: int | None, most_s: float = math.inf) -> float:
    """Runs a job until a step takes as long as the one before. Returns the time of a step.

    `most_s`: see `steady_step_s`.
    """
    first_s = job.next_period_s(max_calls=max_calls, most_s=most_s)
    if first_s > most_s:
        return first_s
    before, period_s, last_s = job.pending, math.inf, math.inf
    for _ in range(1, _MOST_STEPS):
        # Two steps that differ count with their mean, so a longer one after a shorter one may be short enough.
        limit_s = max(most_s, 2 * most_s - period_s) if most_s < math.inf else most_s
        last_s, period_s = period_s, job.next_period_s(max_calls=max_calls, most_s=limit_s)
        if period_s > limit_s:
            return period_s
        if _is_alike(before, now := job.pending, _SAME * period_s):
            return period_s
        if abs(period_s - last_s) <= _STEADY * period_s:
            break
        before = now
    return (period_s + last_s) / 2


def _is_alike(before: Pending, now: Pending, tolerance_s: float) -> bool:
    """Returns whether the same goes on after a step as after the step before: then the next one will be the same."""
    return (
        before.nums_waiting == now.nums_waiting
        and len(before.calls_s) == len(now.calls_s)
        and all(abs(one - other) <= tolerance_s for one, other in zip(before.calls_s, now.calls_s, strict=True))
    )


def _job(
    context: CoreContext,
    shape: SchedulerConfig,
    rates: Rates,
    work: Work,
    *,
    keeps_spans: bool = True,
    others: Sequence[SimulatedBox] = (),
    network: NetworkRates | None = None,
) -> SimulatedJob:
    for box in (SimulatedBox(context=context, rates=rates, work=work), *others):
        _check_rates(box.context, box.rates)
        _check_swapped(box.context, box.work)
    if others and (network is None or len(network.card_bytes) != 1 + len(others)):
        raise ValueError(f"the job has {1 + len(others)} boxes; give the rate of each one's network card")
    return SimulatedJob(context, shape, rates, work, keeps_spans=keeps_spans, others=others, network=network)


def _check_rates(context: CoreContext, rates: Rates) -> None:
    num_ssds = len(context.ssds)
    if len(rates.ssd_read_bytes) != num_ssds or len(rates.ssd_write_bytes) != num_ssds:
        raise ValueError(f"the job has {num_ssds} SSDs; rates are given for {len(rates.ssd_read_bytes)}")


def _check_swapped(context: CoreContext, work: Work) -> None:
    plan = context.plan
    swapping = {block for block, choice in enumerate(plan.layer_activations, start=1) if choice.swaps}
    if set(work.swapped_nbytes) != swapping:
        raise ValueError(
            f"the work says what blocks {sorted(work.swapped_nbytes)} swap, and the plan has blocks {sorted(swapping)} "
            "swap: give the bytes of each of these, and of no others"
        )
    slot_nbytes = plan.activations.slot_nbytes
    tensors = [nbytes for tensors in work.swapped_nbytes.values() for nbytes in tensors]
    num_groups = context.num_groups_in_flight
    needed = num_groups * plan.group_size * sum(-(-nbytes // slot_nbytes) for nbytes in tensors)
    num_slots = plan.num_host_activations + plan.num_ssd_activations
    if needed > num_slots:
        raise ValueError(
            f"{num_groups} group(s) of {plan.group_size} micro-batches swap activations that take {needed} slots of "
            f"{bytes_text(slot_nbytes)} at once, and the plan has {num_slots}; give host_activation_nbytes "
            f"and ssd_activation_nbytes of the placement together at least {needed * slot_nbytes}"
        )
