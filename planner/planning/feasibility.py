"""Checks whether jobs fit, and finds the nearest change that makes a job fit.

Each such question tries many jobs. The integer program alone excludes most of them quickly. A job counts as fitting
only if its device memory was counted exactly. The exact count is slow, so it is done only near the border.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel

from windlass.amounts import GIB
from windlass.engine.memory_plan import DeviceNeed, MemoryTier, Placement, QueueDepths, reserved_nbytes
from windlass.planner.planning.exact_search import solve_exactly
from windlass.planner.planning.profiles import Profiles
from windlass.planner.planning.question import PlanQuestion
from windlass.planner.solver import (
    DRIVER_NBYTES,
    DoesNotFitError,
    PlannedJob,
    StepCosts,
    largest,
    least_nbytes,
    may_fit,
    may_stream_grads,
    plan_of,
    processes_nbytes,
    sizes_at_the_border,
    smallest,
)

_Part = TypeVar("_Part", bound=BaseModel)
# GiB: a budget below the first number is searched in steps of the second one.
_SMALL_BUDGET_GIB, _BUDGET_UNIT_GIB = 4.0, 1 / 64
# Number of times that the GPU's budget is raised by what it lacks. Mostly two are enough.
_MAX_RAISES = 5
# Bytes that may be lost by rounding: one of the missing bytes, and one of what the allocator's reserve leaves.
_ROUNDED_NBYTES = 2
_FEW_TOKENS = 64  # tokens of an example: the search goes no shorter


def with_part(part: _Part, **changes: Any) -> _Part:
    """Returns a copy of a machine, or of a part of one, with some fields changed."""
    return part.model_copy(update=changes)


def fits(question: PlanQuestion, profiles: Profiles) -> bool:
    """Checks whether a plan exists."""
    # Try many small micro-batches first, because these usually need least memory.
    return _fitting_number(question, profiles, reversed(list(numbers_of_microbatches(question)))) is not None


def largest_fitting(ask: Callable[[int], PlanQuestion], profiles: Profiles, *, most: int) -> int:
    """Returns the largest number up to `most` for which the job fits, or 0 if it does not fit for 1.

    The job must fit for all smaller numbers as well. The search starts at the border that the integer program finds.
    The exact border is close to it, because the program leaves out few bytes.
    """
    number = largest(lambda each: _may_fit(ask(each), profiles), most=most)
    does_not, step = number + 1, max(1, number // 32)
    while number and not fits(ask(number), profiles):
        does_not, number, step = number, max(0, number - step), 2 * step
    while does_not - number > 1:
        middle = (number + does_not) // 2
        number, does_not = (middle, does_not) if fits(ask(middle), profiles) else (number, middle)
    return number


def with_enough_device_memory(question: PlanQuestion, profiles: Profiles, error: DoesNotFitError) -> DoesNotFitError:
    """Returns the error with the bytes by which a GPU's budget must grow, so that the job fits as far as that helps.

    They include what PyTorch's allocator reserves. The error's own bytes are the integer program's, which leaves out
    some that the exact count has.
    """
    missing = lacking = error.missing
    if not question.has_gpu or not missing[MemoryTier.DEVICE]:
        return error
    number, raised = max(numbers_of_microbatches(question)), question
    for _ in range(_MAX_RAISES):
        needed_nbytes = int(raised.limits.device_nbytes) + lacking[MemoryTier.DEVICE] + _ROUNDED_NBYTES
        raised = _with_device_budget(question, reserved_nbytes(needed_nbytes))
        try:
            solve_exactly(raised, number, profiles)
        except DoesNotFitError as still:
            lacking = still.missing
        else:
            break
        if lacking[MemoryTier.HOST] or lacking[MemoryTier.SSD]:
            break
    device_nbytes = math.ceil(raised.budgets.device_nbytes - question.budgets.device_nbytes)
    return DoesNotFitError(lambda: missing | {MemoryTier.DEVICE: device_nbytes})


def _with_device_budget(question: PlanQuestion, nbytes: int) -> PlanQuestion:
    """Returns the question for a GPU budget, on a GPU that has so much memory."""
    gpus = question.hardware.gpus
    gpus = with_part(gpus, memory_gib=max(gpus.memory_gib, (nbytes + DRIVER_NBYTES) / GIB))
    return replace(question, hardware=with_part(question.hardware, gpus=gpus), device_memory_nbytes=nbytes)


def what_would_fit(question: PlanQuestion, profiles: Profiles) -> list[str]:
    """Names the nearest change of each kind that makes a job fit, the cheapest first. The job must not fit as it is."""
    changes = [
        _other_microbatches(question, profiles),
        _smaller_sums(question, profiles),
        _smaller(question, profiles),
    ]
    changes += [_with_more(question, profiles, memory) for memory in _MEMORIES]
    reasons = [f"it fits with {words}" for words in changes if words is not None]
    return reasons or ["it fits with more of every kind of memory only"]


def what_takes_memory(question: PlanQuestion, profiles: Profiles, error: DoesNotFitError) -> list[str]:
    """Names the largest parts of the device memory need, if device memory is short.

    The parts are those of the plan that saves most: with streamed layers, in the groups that need least. These have one
    micro-batch, unless the sums that groups pass on take more than the activations of larger groups.
    """
    if not error.missing[MemoryTier.DEVICE] or question.num_layers is not None:
        return []
    job = profiles.job(question, max(numbers_of_microbatches(question)))
    needs = {size: _least_need(question, profiles, job, size) for size in sizes_at_the_border(job)}
    size = min(needs, key=lambda size: needs[size].nbytes if question.has_gpu else needs[size].settled_nbytes)
    at_once = "one micro-batch" if size == 1 else f"{size} micro-batches"
    parts = needs[size].in_words(on_gpu=question.has_gpu)
    return [f"with {at_once} at a time and layers in pieces the device's memory goes to: {parts}"]


def _least_need(question: PlanQuestion, profiles: Profiles, job: PlannedJob, group_size: int) -> DeviceNeed:
    """Returns the device memory of the plan with groups of this size that saves most."""
    costs = StepCosts(
        job=job,
        speeds=question.speeds,
        limits=question.limits,
        group_size=group_size,
        streams=True,
        num_grad_buffers=1,
        depths=QueueDepths(leaving_nbytes=0),
    )
    placement = Placement(
        group_size=group_size,
        streamed_blocks=costs.streamed_blocks,
        num_grad_buffers=1,
        num_cached_params=0,
        depths=costs.depths,
    )
    ways = [placement, *([replace(placement, streams_grads=True)] if may_stream_grads(job) else [])]
    needs = [profiles.device_need_of_plan(question, job, plan_of(costs, way, None)) for way in ways]
    return min(needs, key=lambda need: need.nbytes)


def numbers_of_microbatches(question: PlanQuestion) -> Iterator[int]:
    """The numbers of micro-batches to try: the requested one, or numbers up to the batch size.

    The first is the smallest one with equal lanes and a micro-batch for each GPU. Each next one is twice as large.
    """
    if not question.chooses_microbatches:
        yield question.training.num_microbatches
        return
    number = min(question.least_microbatches, question.training.batch_size)
    while number <= question.training.batch_size:
        yield number
        number *= 2


def _may_fit(question: PlanQuestion, profiles: Profiles) -> bool:
    speeds, limits = question.speeds, question.limits
    return any(may_fit(profiles.job(question, number), speeds, limits) for number in numbers_of_microbatches(question))


def _fitting_number(question: PlanQuestion, profiles: Profiles, numbers: Iterable[int]) -> int | None:
    """Returns the first number of micro-batches with which the job fits, or None."""
    speeds, limits = question.speeds, question.limits
    for number in numbers:
        if may_fit(profiles.job(question, number), speeds, limits):
            try:
                solve_exactly(question, number, profiles)
            except DoesNotFitError:
                continue
            return number
    return None


def _other_microbatches(question: PlanQuestion, profiles: Profiles) -> str | None:
    if question.chooses_microbatches:
        return None
    free = replace(question, chooses_microbatches=True)
    number = _fitting_number(free, profiles, numbers_of_microbatches(free))
    return None if number is None else f"{number} micro-batches"


def _smaller_sums(question: PlanQuestion, profiles: Profiles) -> str | None:
    """Proposes to sum the gradients of micro-batches in the model's precision."""
    training, precision = question.training, question.training.precision
    is_summed = question.chooses_microbatches or training.num_microbatches > 1
    if not is_summed or training.accumulation_precision == precision or training.lanes > 1:
        return None  # several lanes are summed in fp32 only
    if not fits(question.changed(accumulation_precision=precision), profiles):
        return None
    return f"gradients summed in {precision} (accumulation_precision), which is less exact"


def _smaller(question: PlanQuestion, profiles: Profiles) -> str | None:
    """Proposes a smaller batch in micro-batches of one or two examples, or else one shorter example."""

    def cut(batch_size: int) -> PlanQuestion:
        lanes = min(question.training.lanes, batch_size)
        number = lanes << ((batch_size // lanes).bit_length() - 1)  # equal lanes
        return question.changed(batch_size=batch_size, num_microbatches=number)

    if batch_size := largest_fitting(cut, profiles, most=question.training.batch_size - 1):
        smaller = cut(batch_size)
        parts = f"{smaller.training.num_microbatches} micro-batches{_left_out(question, smaller)}"
        return f"a batch of {batch_size} in {parts}"

    def one(num_tokens: int) -> PlanQuestion:
        return question.changed(batch_size=1, num_microbatches=1, sequence_length=num_tokens)

    num_tokens = question.widest
    if num_tokens <= _FEW_TOKENS or not fits(one(_FEW_TOKENS), profiles):
        return None
    while not fits(one(num_tokens := max(_FEW_TOKENS, num_tokens * 3 // 4)), profiles):
        pass
    return f"a batch of 1 and sequences of {num_tokens} tokens{_left_out(question, one(num_tokens))}"


def _left_out(question: PlanQuestion, smaller: PlanQuestion) -> str:
    """Names the settings that a smaller batch also needs, because lanes and GPUs need a micro-batch each."""
    numbers = {
        "lanes": (question.training.lanes, smaller.training.lanes),
        "gpus": (question.num_ranks, smaller.num_ranks),
    }
    changes = [f"{name}={after}" for name, (before, after) in numbers.items() if after < before]
    return f", with {' and '.join(changes)}" if changes else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """One kind of memory, with its names in machine profiles and in budgets."""

    words: str
    part: str  # field of `Hardware` that has the key
    key: str
    tier: MemoryTier
    budget: str | None  # field of `PlanQuestion`; None: this memory has no budget
    setting: str | None  # setting of that budget, in jobs and in the installation
    others_nbytes: Callable[[int], int]  # bytes of this memory that are not available to a job with so many GPUs


_MEMORIES = (
    _Memory(
        words="host memory",
        part="host",
        key="memory_gib",
        tier=MemoryTier.HOST,
        budget="host_memory_nbytes",
        setting="host_memory_gib",
        others_nbytes=processes_nbytes,
    ),
    _Memory(
        words="GPU memory",
        part="gpus",
        key="memory_gib",
        tier=MemoryTier.DEVICE,
        budget="device_memory_nbytes",
        setting="gpu_memory_gib",
        others_nbytes=lambda num_ranks: DRIVER_NBYTES,
    ),
    _Memory(
        words="each SSD",
        part="ssds",
        key="capacity_gib",
        tier=MemoryTier.SSD,
        budget=None,
        setting=None,
        others_nbytes=lambda num_ranks: 0,
    ),
)


def _with_more(question: PlanQuestion, profiles: Profiles, memory: _Memory) -> str | None:
    """Finds the smallest size of one kind of memory with which the job fits.

    If the job has a budget for this memory, the size is that of the budget. Returns None if more memory does not help.
    """
    is_cpu = not question.has_gpu
    is_budget = memory.budget is not None and getattr(question, memory.budget) is not None
    if is_cpu and memory.tier is MemoryTier.DEVICE and not is_budget:
        return None  # the device uses the host's memory
    speeds, limits = question.speeds, question.limits
    jobs = (profiles.job(question, number) for number in numbers_of_microbatches(question))
    least = [nbytes for job in jobs if (nbytes := least_nbytes(job, speeds, limits, memory.tier)) is not None]
    given = limits.by_tier[memory.tier]
    exactly_counted = (MemoryTier.HOST, MemoryTier.DEVICE) if is_cpu else (MemoryTier.DEVICE,)
    if not least or (min(least) <= given and memory.tier not in exactly_counted):
        # More of this memory does not help. Or the program lacks none, and only the device's memory is counted again.
        return None
    part = getattr(question.hardware, memory.part)
    others_nbytes = memory.others_nbytes(question.num_ranks)
    num_parts = part.count if memory.tier is MemoryTier.SSD else 1
    has_reserve = memory.tier is MemoryTier.DEVICE and not is_cpu
    needed_nbytes = reserved_nbytes(math.ceil(min(least))) if has_reserve else min(least)
    # A budget covers the job alone.
    least_gib = (needed_nbytes + (0 if is_budget else others_nbytes)) / num_parts / GIB
    # Machines have whole GiB; a budget may be any number of GiB.
    unit_gib = _BUDGET_UNIT_GIB if is_budget and least_gib < _SMALL_BUDGET_GIB else 1.0
    least_units = max(1, math.ceil(least_gib / unit_gib))

    def with_units(number: int) -> PlanQuestion:
        gib, budgets = number * unit_gib, dict[str, Any]()
        enough = gib
        if is_budget:
            is_the_hosts = is_cpu and memory.tier is MemoryTier.DEVICE
            available = getattr(part, memory.key)
            enough = available if is_the_hosts else max(available, gib + others_nbytes / GIB)
            budgets[str(memory.budget)] = int(gib * GIB)
        changed = with_part(part, **{memory.key: enough})
        return replace(question, hardware=with_part(question.hardware, **{memory.part: changed}), **budgets)

    # The exact count may need more than the program. If twice as much does not help either, this memory is not short.
    most = least_units
    if not fits(with_units(least_units + most), profiles):
        return None
    more = smallest(lambda number: fits(with_units(least_units - 1 + number), profiles), most=most)
    units = least_units - 1 + more if more is not None else least_units + most
    gib = f"{units * unit_gib:.10g} GiB"
    if memory.tier is MemoryTier.SSD:
        return f"{gib} on {memory.words}"
    if not is_budget:
        return f"{gib} of {memory.words}"
    needs = getattr(with_units(units).hardware, memory.part)
    beside = "" if needs == part else f", on a machine with {getattr(needs, memory.key):.1f} GiB"
    return f"a budget of {gib} of {memory.words} ({memory.setting}, of the job or of the settings){beside}"
