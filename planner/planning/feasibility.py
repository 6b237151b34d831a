"""Whether jobs would fit, and the nearest change that makes one fit.

Each question of that kind tries many jobs. The integer program alone tells quickly which ones cannot fit; a job counts
as fitting only when its device's memory was gone through exactly, so that is done at the border only.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from windlass.amounts import GIB
from windlass.engine.memory_plan import Placement, QueueDepths
from windlass.planner.planning.bisection import largest, smallest
from windlass.planner.planning.report import DRIVER_NBYTES, PROCESSES_NBYTES
from windlass.planner.solver import DoesNotFitError, StepCosts, Tier, least_nbytes, may_fit, plan_of

if TYPE_CHECKING:
    from windlass.planner.planning.planner import PlanQuestion, Profiles

_Part = TypeVar("_Part", bound=BaseModel)
# A budget of less than so many GiB is looked for in steps of so many.
_SMALL_BUDGET_GIB, _BUDGET_UNIT_GIB = 4.0, 1 / 64
_FEW_TOKENS = 64  # of an example; shorter ones are worth no search


def with_part(part: _Part, **changes: Any) -> _Part:
    """A machine, or a part of one, with other numbers."""
    return part.model_copy(update=changes)


def fits(question: "PlanQuestion", profiles: "Profiles") -> bool:
    """Whether there is a plan."""
    # The smaller the micro-batches, the sooner a job fits, as a rule.
    return _fitting_number(question, profiles, reversed(list(numbers_of_microbatches(question)))) is not None


def largest_fitting(ask: Callable[[int], "PlanQuestion"], profiles: "Profiles", *, most: int) -> int:
    """The largest number up to `most` for which a job fits, where all smaller ones do; 0 if not even for 1.

    By the program first: what it leaves out moves the border by little.
    """
    number = largest(lambda each: _may_fit(ask(each), profiles), most=most)
    does_not, step = number + 1, max(1, number // 32)
    while number and not fits(ask(number), profiles):
        does_not, number, step = number, max(0, number - step), 2 * step
    while does_not - number > 1:
        middle = (number + does_not) // 2
        number, does_not = (middle, does_not) if fits(ask(middle), profiles) else (number, middle)
    return number


def what_would_fit(question: "PlanQuestion", profiles: "Profiles") -> list[str]:
    """The nearest change of each kind, the cheapest first. Of a job that does not fit."""
    found = [_other_microbatches(question, profiles), _smaller(question, profiles)]
    found += [_with_more(question, profiles, memory) for memory in _MEMORIES]
    told = [f"it fits with {words}" for words in found if words is not None]
    return told or ["it fits with more of every kind of memory only"]


def what_takes_memory(question: "PlanQuestion", profiles: "Profiles", error: DoesNotFitError) -> list[str]:
    """Names the parts that need most of the device's memory in a job that saves it, if that memory is short."""
    if not error.missing[Tier.DEVICE] or question.num_layers is not None:
        return []
    job = profiles.job(question, max(numbers_of_microbatches(question)))
    costs = StepCosts(
        job=job,
        speeds=question.speeds,
        limits=question.limits,
        group_size=1,
        streams=True,
        num_grad_buffers=1,
        depths=QueueDepths(leaving_nbytes=0),
    )
    placement = Placement(
        group_size=1,
        streamed_blocks=costs.streamed_blocks,
        num_grad_buffers=1,
        num_cached_params=0,
        depths=costs.depths,
    )
    need = profiles.device_need_of_plan(question, job, plan_of(costs, placement, None))
    return [f"with one micro-batch at a time and layers in pieces the device's memory goes to: {need.in_words()}"]


def numbers_of_microbatches(question: "PlanQuestion") -> Iterator[int]:
    """Those that are asked for, or may be chosen: twice as many each time."""
    if question.num_microbatches is not None:
        yield question.num_microbatches
        return
    number = 1
    while number <= question.batch_size:
        yield number
        number *= 2


def _may_fit(question: "PlanQuestion", profiles: "Profiles") -> bool:
    speeds, limits = question.speeds, question.limits
    return any(may_fit(profiles.job(question, number), speeds, limits) for number in numbers_of_microbatches(question))


def _fitting_number(question: "PlanQuestion", profiles: "Profiles", numbers: Iterable[int]) -> int | None:
    """The first number of micro-batches with which it fits."""
    speeds, limits = question.speeds, question.limits
    for number in numbers:
        if may_fit(profiles.job(question, number), speeds, limits):
            try:
                profiles.solve(question, number)
            except DoesNotFitError:
                continue
            return number
    return None


def _other_microbatches(question: "PlanQuestion", profiles: "Profiles") -> str | None:
    if question.num_microbatches is None:
        return None
    free = replace(question, num_microbatches=None)
    number = _fitting_number(free, profiles, numbers_of_microbatches(free))
    return None if number is None else f"{number} micro-batches"


def _smaller(question: "PlanQuestion", profiles: "Profiles") -> str | None:
    """A smaller batch, in micro-batches of one or two examples; or one example, and that shorter."""

    def cut(batch_size: int) -> "PlanQuestion":
        number = 1 << max(0, batch_size.bit_length() - 1)
        return replace(question, batch_size=batch_size, num_microbatches=number)

    if batch_size := largest_fitting(cut, profiles, most=question.batch_size - 1):
        return f"a batch of {batch_size} in {cut(batch_size).num_microbatches} micro-batches"

    def one(num_tokens: int) -> "PlanQuestion":
        return replace(question, batch_size=1, num_microbatches=1, sequence_length=num_tokens)

    num_tokens = question.widest
    if num_tokens <= _FEW_TOKENS or not fits(one(_FEW_TOKENS), profiles):
        return None
    while not fits(one(num_tokens := max(_FEW_TOKENS, num_tokens * 3 // 4)), profiles):
        pass
    return f"a batch of 1 and sequences of {num_tokens} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """One kind, as machines and budgets name it."""

    words: str
    part: str  # of the machine, and its key
    key: str
    tier: Tier
    budget: str | None  # a field of the question
    setting: str | None  # which is this one of jobs and of the installation
    others_nbytes: int  # what is taken besides by what is not the job's


_MEMORIES = (
    _Memory(
        words="host memory",
        part="host",
        key="memory_gib",
        tier=Tier.HOST,
        budget="host_memory_nbytes",
        setting="host_memory_gib",
        others_nbytes=PROCESSES_NBYTES,
    ),
    _Memory(
        words="GPU memory",
        part="gpus",
        key="memory_gib",
        tier=Tier.DEVICE,
        budget="device_memory_nbytes",
        setting="gpu_memory_gib",
        others_nbytes=DRIVER_NBYTES,
    ),
    _Memory(
        words="each SSD",
        part="ssds",
        key="capacity_gib",
        tier=Tier.SSD,
        budget=None,
        setting=None,
        others_nbytes=0,
    ),
)


def _with_more(question: "PlanQuestion", profiles: "Profiles", memory: _Memory) -> str | None:
    """The smallest size of one kind of memory with which the job fits; of its budget, where that is what is short."""
    is_cpu = question.hardware.gpus.count == 0
    is_budget = memory.budget is not None and getattr(question, memory.budget) is not None
    if is_cpu and memory.tier is Tier.DEVICE and not is_budget:
        return None  # it is the host's
    speeds, limits = question.speeds, question.limits
    jobs = (profiles.job(question, number) for number in numbers_of_microbatches(question))
    least = [nbytes for job in jobs if (nbytes := least_nbytes(job, speeds, limits, memory.tier)) is not None]
    given = limits.by_tier[memory.tier]
    exactly_counted = (Tier.HOST, Tier.DEVICE) if is_cpu else (Tier.DEVICE,)
    if not least or (min(least) <= given and memory.tier not in exactly_counted):
        return None  # it does not help; or the program lacks nothing, and only the device's memory is counted otherwise
    part = getattr(question.hardware, memory.part)
    # GiB of a budget are the job's alone.
    others_nbytes = 0 if is_budget else memory.others_nbytes
    num_parts = part.count if memory.tier is Tier.SSD else 1
    least_gib = (min(least) + others_nbytes) / num_parts / GIB
    # Machines have whole GiB, budgets any number of them.
    unit_gib = _BUDGET_UNIT_GIB if is_budget and least_gib < _SMALL_BUDGET_GIB else 1.0
    least_units = max(1, math.ceil(least_gib / unit_gib))

    def with_units(number: int) -> "PlanQuestion":
        gib, budgets = number * unit_gib, dict[str, Any]()
        enough = gib
        if is_budget:
            is_the_hosts = is_cpu and memory.tier is Tier.DEVICE
            there = getattr(part, memory.key)
            enough = there if is_the_hosts else max(there, gib + memory.others_nbytes / GIB)
            budgets[str(memory.budget)] = int(gib * GIB)
        changed = with_part(part, **{memory.key: enough})
        return replace(question, hardware=with_part(question.hardware, **{memory.part: changed}), **budgets)

    # Not everything that the program fits in fits exactly; but if so much more does not help, this memory is not short.
    most = least_units
    if not fits(with_units(least_units + most), profiles):
        return None
    more = smallest(lambda number: fits(with_units(least_units - 1 + number), profiles), most=most)
    units = least_units - 1 + more if more is not None else least_units + most
    gib = f"{units * unit_gib:.10g} GiB"
    if memory.tier is Tier.SSD:
        return f"{gib} on {memory.words}"
    if not is_budget:
        return f"{gib} of {memory.words}"
    needs = getattr(with_units(units).hardware, memory.part)
    beside = "" if needs == part else f", on a machine with {getattr(needs, memory.key):.1f} GiB"
    return f"a budget of {gib} of {memory.words} ({memory.setting}, of the job or of the settings){beside}"
