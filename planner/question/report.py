"""Reports a plan in words and numbers, for users and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from windlass.amounts import GB, GIB, number_text
from windlass.engine.memory_plan import EVERY_OPERATOR, BlockActivations, MemoryTier, Plan, reserved_nbytes
from windlass.planner.cost import LayerProfile, ways_of_layer
from windlass.planner.predictions import StepInterval
from windlass.planner.solver import Limits, PlannedJob, Solution, others_nbytes

_Any = TypeVar("_Any")

# Share of a step: waits and work that cannot overlap are told from so much on.
_LEAST_TOLD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleTokens:
    """Tokens of an example, with padding, that a plan assumes: memory is for the widest, time for the mean."""

    limit: int  # longer examples are cut
    widest: int
    mean: float
    of_data: bool  # taken from the job's data; else every example is assumed to have the maximum length


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The plan of a job that has one thing changed. Without a plan, the numbers are None."""

    # The kind of change. Of the machine: ssds, ram, card, gpus, box. Of the job: batch, clip, split_states,
    # bf16_states.
    key: str
    change: str  # in words
    feasible: bool
    step_s: float | None
    tokens_per_s: float | None
    gain: float | None  # of tokens per second: 0.5 are half as many more. None: the job does not fit as it is
    problem: str | None = None  # why there is no plan, if that is not because the job does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The properties of a plan, which the user sees before the job runs. Times in seconds, GiB 2^30, GB 10^9 bytes."""

    feasible: bool
    reasons: tuple[str, ...]  # why the job does not fit and what would fit; or the bottleneck and what would be faster
    step_s: float | None = None  # simulated; the cost model's bound if the model's layers are hypothetical
    # Between these times the step of nine of ten jobs lies, as far as is known; see `planner.planning.confidence`.
    step_s_low: float | None = None
    step_s_high: float | None = None
    times_from: str | None = None  # the source of the times that are added up, a `TimesFrom`
    # If it was asked for: about the seconds that it takes to measure the times of blocks that lack. None: none lack.
    measuring_s: float | None = None
    num_compared: int | None = None  # finished jobs of this machine that tell how sure the step time is
    bound_s: float | None = None  # lower bound by the cost model
    tokens_per_s: float | None = None
    tflops: float | None = None  # 10^12 operations per second of the model, without recomputation
    bottleneck: str | None = None
    busy_s: dict[str, float] | None = None  # by resource, per step
    peak_gib: dict[str, float] | None = None  # by tier, with the memory of processes, the driver and its allocator
    engine_gib: dict[str, float] | None = None  # by tier, allocated by the job itself, as can be measured
    # By tier, for `peak_gib`: the machine's memory, or the job's budget with what processes and the driver take.
    peak_limit_gib: dict[str, float] | None = None
    limit_gib: dict[str, float] | None = None  # by tier, for `engine_gib`: what the machine and the job's budgets allow
    missing_bytes: dict[str, int] | None = None  # by tier, if nothing fits: by which its limit must grow
    missing_together: bool | None = None  # all of `missing_bytes` are needed; False: one of them is enough
    least_gpu_gib: float | None = None  # of a card on which the job has a plan, with the driver's and the allocator's
    least_gpu_reason: str | None = None  # the largest parts of it
    ssd_write_gb_per_step: float | None = None
    choices: dict[str, Any] | None = None
    example_tokens: ExampleTokens | None = None

    @property
    def least_missing_nbytes(self) -> int:
        """The fewest bytes of memory, of all kinds together, that would make the job fit."""
        lacking = [nbytes for nbytes in (self.missing_bytes or {}).values() if nbytes]
        return min(lacking, default=0) if self.missing_together is False else sum(lacking)

    what_if: tuple[WhatIf, ...] | None = None  # if it was asked for; the largest gain first


def report_of(job: PlannedJob, solution: Solution, *, is_cpu: bool, step_s: float | None = None) -> PlanReport:
    """Reports a plan that fits. `step_s`: simulated step time; None: the cost model's bound."""
    bound_s = solution.step_s
    step_s = bound_s if step_s is None else step_s
    model = job.model
    # All micro-batches are planned as the largest one. Not all have as many examples.
    num_microbatches = job.training.batch_size / model.num_examples
    num_tokens = model.num_examples * model.num_tokens * model.size_share * num_microbatches
    num_flops = 3 * model.num_flops * num_microbatches
    nbytes = solution.nbytes
    taken = nbytes if is_cpu else nbytes | {MemoryTier.DEVICE: reserved_nbytes(int(nbytes[MemoryTier.DEVICE]))}
    others = others_nbytes(job.num_ranks, is_cpu=is_cpu)
    devices = "devices" if is_cpu else "GPUs"
    return PlanReport(
        feasible=True,
        reasons=(
            _bound_in_words(solution, step_s),
            *_idle_in_words(solution.plan, devices),
            *_unequal_lanes_in_words(job, devices),
        ),
        step_s=step_s,
        bound_s=bound_s,
        tokens_per_s=num_tokens / step_s,
        tflops=num_flops / step_s / 1e12,
        bottleneck=solution.bottleneck,
        busy_s=solution.busy_s,
        peak_gib={tier.value: (taken[tier] + others[tier]) / GIB for tier in MemoryTier},
        engine_gib={tier.value: nbytes[tier] / GIB for tier in MemoryTier},
        ssd_write_gb_per_step=ssd_written_nbytes(job, solution) / GB,
        choices=choices_of(job, solution),
    )


def with_limits(report: PlanReport, limits: Limits, *, is_cpu: bool) -> PlanReport:
    """Returns the report with the job's memory limits; if the job fits, also with those of the peaks."""
    limit_gib = {tier.value: nbytes / GIB for tier, nbytes in limits.by_tier.items()}
    if report.choices is None:
        return replace(report, limit_gib=limit_gib)
    others = others_nbytes(report.choices["gpus"], is_cpu=is_cpu)
    peak_limit_gib = {tier.value: limit_gib[tier.value] + nbytes / GIB for tier, nbytes in others.items()}
    return replace(report, limit_gib=limit_gib, peak_limit_gib=peak_limit_gib)


def with_interval(report: PlanReport, interval: StepInterval) -> PlanReport:
    """Returns the report with the interval of its step time."""
    return replace(
        report,
        step_s_low=interval.low_s,
        step_s_high=interval.high_s,
        times_from=interval.times_from,
        num_compared=interval.num_compared,
    )


def ssd_written_nbytes(job: PlannedJob, solution: Solution) -> float:
    """Returns the bytes that a step writes to the SSDs: states, activations, and kept gradients."""
    plan, blocks = solution.plan, job.model.blocks
    in_memory = {*plan.host_blocks, *plan.device_blocks}
    states = sum(
        block.numel * job.state_itemsize / (plan.commit_every if index in in_memory else 1)
        for index, block in enumerate(blocks)
    )
    grads = sum(blocks[index].numel * job.grad_itemsize for index in plan.spilled_blocks)
    activations = solution.placement.ssd_activation_nbytes * plan.num_groups * job.model.size_share
    return states + grads + activations


def choices_of(job: PlannedJob, solution: Solution) -> dict[str, Any]:
    """Returns the plan's decisions by name."""
    plan, placement = solution.plan, solution.placement
    num_blocks = len(job.model.blocks)
    in_memory = len(plan.device_blocks) + len(plan.host_blocks)
    return {
        "gpus": plan.num_ranks,
        "num_microbatches": job.num_microbatches,
        "group_size": plan.group_size,
        "gradient_updates": job.update_order.value,
        "states_on_gpu": len(plan.device_blocks),
        "states_on_host": len(plan.host_blocks),
        "states_on_ssd": num_blocks - in_memory,
        "kept_grads_on_ssd": len(plan.spilled_blocks),
        "cached_params_gib": plan.num_cached_params * plan.params.slot_nbytes / GIB,
        "layers_in_pieces": len(placement.streamed_blocks),
        "ends_in_pieces": plan.streams_ends,
        "cut_matrices": job.cut,
        "grad_buffers_on_gpu": plan.num_grad_buffers,
        "grads_in_pieces": len(plan.grad_streamed_blocks),
        "commit_every": plan.commit_every,
        "states": _states_of_blocks(solution, num_blocks),
        "activations": [
            {"layers": layers, **activations_in_words(choice), **_sizes_mib(model_layer, choice)}
            for layers, (choice, model_layer) in _runs(list(zip(placement.activations, job.model.layers, strict=True)))
        ],
        # Each GPU worker has slots of its own.
        "activations_on_host_gib": plan.num_ranks * placement.host_activation_nbytes / GIB,
        "activations_on_ssd_gib": plan.num_ranks * placement.ssd_activation_nbytes / GIB,
    }


def activations_in_words(choice: BlockActivations) -> dict[str, Any]:
    """Describes what is kept, swapped and recomputed of a layer's input and of its operators' outputs."""
    description: dict[str, Any] = {"input": "swapped" if choice.swap_input else "kept"}
    if not choice.recompute:
        description["rest"] = "swapped" if EVERY_OPERATOR in choice.swapped else "kept"
        return description
    description["rest"] = "recomputed"
    for name, operators in (("kept", choice.kept), ("swapped", choice.swapped)):
        if operators:
            description[name] = sorted(operators)
    return description


def _states_of_blocks(solution: Solution, num_blocks: int) -> list[dict[str, Any]]:
    """Describes where blocks are resident, from block 0, the embedding. Equal neighbours share an entry."""
    plan = solution.plan
    placed = [
        {
            "rest_on": "gpu" if block in plan.device_blocks else "host" if block in plan.host_blocks else "ssd",
            "in_pieces": block in plan.streamed_blocks,
            "grads_on_ssd": block in plan.spilled_blocks,
        }
        for block in range(num_blocks)
    ]
    return [{"blocks": blocks, **place} for blocks, place in _runs(placed)]


def _sizes_mib(layer: LayerProfile, choice: BlockActivations) -> dict[str, float]:
    """Divides a layer's activations of one micro-batch into kept, swapped and recomputed MiB."""
    way = next(way for way in ways_of_layer(layer) if way.choice == choice)
    everything = layer.input_nbytes + layer.saved_nbytes
    again = 0 if not choice.recompute else max(0, everything - way.held_nbytes - way.swapped_nbytes)
    sizes = {"kept_mib": way.held_nbytes, "swapped_mib": way.swapped_nbytes, "recomputed_mib": again}
    return {name: nbytes / 2**20 for name, nbytes in sizes.items()}


def _runs(items: Sequence[_Any]) -> list[tuple[str, _Any]]:
    """Joins equal neighbours, with their range of indices from 0: ("0-3", item)."""
    runs = []
    for same, group in groupby(enumerate(items), key=lambda pair: pair[1]):
        numbers = [number for number, _ in group]
        runs.append((f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]), same))
    return runs


_IN_WORDS = {
    "compute": "what is computed on the device",
    "h2d": "what is copied to the device",
    "d2h": "what is copied from the device",
    "ssd": "what the SSDs read and write",
    "optimizer": "the update of the parameters on the CPU",
    "host_memory": "what is read and written in host memory",
}


def _idle_in_words(plan: Plan, devices: str) -> list[str]:
    """Says which GPUs have no group of micro-batches in the last round, or in none."""
    num_ranks, num_groups = plan.num_ranks, plan.num_groups
    num_rounds = -(-num_groups // num_ranks)
    num_idle = num_rounds * num_ranks - num_groups
    if not num_idle:
        return []
    groups = f"{num_groups} groups of micro-batches"
    if num_rounds == 1:
        return [f"{num_idle} of {num_ranks} {devices} compute nothing: a step has only {groups}"]
    return [f"{num_idle} of {num_ranks} {devices} wait in the last of {num_rounds} rounds: a step has {groups}"]


def _bound_in_words(solution: Solution, step_s: float) -> str:
    """Names the busiest resource. If it is idle for much of the step, also tells what the step takes beside it."""
    busy_s = solution.busy_s
    first, second = sorted(busy_s, key=busy_s.__getitem__, reverse=True)[:2]
    share = f"{busy_s[first] / step_s:.0%} of the step"
    told = f"a step is bound by {_IN_WORDS[first]}: {number_text(busy_s[first])} s, {share}"
    rest = {
        "goes to other work that cannot overlap with that": solution.step_s - busy_s[first],
        "passes in waits": step_s - solution.step_s,
    }
    shares = [f"{seconds / step_s:.0%} {what}" for what, seconds in rest.items() if seconds > _LEAST_TOLD * step_s]
    if not shares:
        return told
    return f"{told}; {', '.join(shares)}; second is {_IN_WORDS[second]}, {busy_s[second] / step_s:.0%}"


def _unequal_lanes_in_words(job: PlannedJob, devices: str) -> Iterator[str]:
    """Tells if lanes have unequal numbers of micro-batches, and with which number they would be equal."""
    num_lanes = job.lanes.num_lanes
    sizes = sorted({len(job.lanes.microbatches(lane)) for lane in range(num_lanes)})
    if len(sizes) > 1:
        more = sizes[-1] * num_lanes
        equal = more if more <= job.training.batch_size else sizes[0] * num_lanes
        yield (
            f"the {num_lanes} lanes have {sizes[0]} or {sizes[-1]} micro-batches, so {devices} that share them would "
            f"not end together; with num_microbatches {equal} they are equal"
        )
