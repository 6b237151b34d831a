"""The memory that a job lacks: the least of each kind with which it fits, and the part of the job that sets it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from windlass.amounts import GIB, bytes_text, least_gib, least_text
from windlass.engine.memory_plan import MemoryTier, reserved_nbytes
from windlass.planner.feasibility.least_memory import LeastMemory, Need
from windlass.planner.hardware import Ssds
from windlass.planner.question import PlanQuestion, PlanReport
from windlass.planner.solver import DRIVER_NBYTES, Bytes, processes_nbytes

# Bytes that may be lost by rounding where the allocator's reserve is added and subtracted.
_ROUNDED_NBYTES = 2
# Price of a byte, compared with a byte on SSDs: to find the cheapest combination where no kind of memory alone is
# enough. A GPU's memory cannot be extended, so it comes last.
_PRICES = Bytes(device=1024.0, host=32.0, ssd=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One kind of memory, with its names in machine profiles and in budgets."""

    tier: MemoryTier
    words: str
    part: str  # field of `Hardware` that has the key
    key: str
    budget: str | None  # field of `PlanQuestion`; None: this memory has no budget
    setting: str | None  # setting of that budget, in jobs and in the installation
    others_nbytes: Callable[[int], int]  # bytes of this memory that are not available to a job with so many GPUs

    def is_budget(self, question: PlanQuestion) -> bool:
        """Returns whether the job has a budget for this memory."""
        return self.budget is not None and getattr(question, self.budget) is not None

    def in_words(self, question: PlanQuestion) -> str:
        """Names the memory. The device of a machine without a GPU is the CPU."""
        return self.words if question.has_gpu or self.tier is not MemoryTier.DEVICE else "device memory"


# The cheapest first.
MEMORIES = (
    Memory(
        tier=MemoryTier.HOST,
        words="host memory",
        part="host",
        key="memory_gib",
        budget="host_memory_nbytes",
        setting="host_memory_gib",
        others_nbytes=processes_nbytes,
    ),
    Memory(
        tier=MemoryTier.SSD,
        words="space on the SSDs",
        part="ssds",
        key="capacity_gib",
        budget=None,
        setting=None,
        others_nbytes=lambda num_ranks: 0,
    ),
    Memory(
        tier=MemoryTier.DEVICE,
        words="GPU memory",
        part="gpus",
        key="memory_gib",
        budget="device_memory_nbytes",
        setting="gpu_memory_gib",
        others_nbytes=lambda num_ranks: DRIVER_NBYTES,
    ),
)


def limits_for_plans(question: PlanQuestion) -> Bytes:
    """Returns the memory that a plan may allocate. On a CPU only a budget limits the device apart from the host."""
    limits = question.limits
    device = limits.device_nbytes
    if not question.has_gpu and question.device_memory_nbytes is None:
        device = math.inf
    return Bytes(device=device, host=limits.host_nbytes, ssd=limits.ssd_nbytes)


def needed_nbytes(question: PlanQuestion, need: Bytes, tier: MemoryTier) -> int:
    """Returns the limit of a tier (`PlanQuestion.budgets`) that a plan needs, with the allocator's reserve on a GPU."""
    nbytes = math.ceil(need.of(tier))
    if tier is MemoryTier.DEVICE and question.has_gpu:
        return reserved_nbytes(nbytes) + _ROUNDED_NBYTES
    return nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """The memory that a job lacks.

    `needs`: by tier, the plan that fits with the least of it. If `is_together`, no tier alone is enough. All tiers then
    have the same plan, which fits if all of them are as large as it needs.
    """

    question: PlanQuestion
    needs: dict[MemoryTier, Need]
    is_together: bool = False

    @property
    def missing(self) -> dict[MemoryTier, int]:
        """The bytes by which each tier's limit must grow; 0: not lacking, or more of it alone does not help."""
        return {
            tier: max(0, self.needed(tier) - math.floor(nbytes)) if tier in self.needs else 0
            for tier, nbytes in self.question.budgets.by_tier.items()
        }

    def needed(self, tier: MemoryTier) -> int:
        """Returns the limit of a tier in `needs` with which the job fits."""
        return needed_nbytes(self.question, self.needs[tier].nbytes, tier)

    def in_words(self) -> str:
        """Tells that no plan fits, and what is lacking."""
        return f"no plan fits; it lacks {self.amounts_in_words()}"

    def amounts_in_words(self) -> str:
        """Names what is lacking."""
        *others, last = [
            f"{least_text(self.missing[memory.tier])} of {memory.in_words(self.question)}"
            for memory in MEMORIES
            if self.missing[memory.tier]
        ]
        if not others:
            return last
        if self.is_together:
            return f"{', '.join(others)} and {last}; all of that is needed"
        return f"{', '.join(others)} or {last}; one of them is enough"

    def remedies(self) -> list[str]:
        """Names the sizes of memory with which the job fits, the cheapest first."""
        sizes = [
            size_in_words(self.question, memory, self.needed(memory.tier))
            for memory in MEMORIES
            if self.missing[memory.tier]
        ]
        return [", ".join(sizes[:-1]) + f" and {sizes[-1]}"] if self.is_together and len(sizes) > 1 else sizes


def size_in_words(question: PlanQuestion, memory: Memory, nbytes: int) -> str:
    """Names the size of a kind of memory: of the job's budget, if it has one, or else of the machine.

    `nbytes`: its limit, as in `PlanQuestion.budgets`.
    """
    part = getattr(question.hardware, memory.part)
    if memory.tier is MemoryTier.SSD:
        return _ssds_in_words(question.hardware.ssds, nbytes)
    of_machine_nbytes = nbytes + memory.others_nbytes(question.num_ranks)
    if not memory.is_budget(question):
        return f"{least_gib(of_machine_nbytes)} GiB of {memory.words}"
    is_the_hosts = memory.tier is MemoryTier.DEVICE and not question.has_gpu
    has_enough = is_the_hosts or getattr(part, memory.key) * GIB >= of_machine_nbytes
    beside = "" if has_enough else f", on a machine with {least_gib(of_machine_nbytes)} GiB"
    words = memory.in_words(question)
    return f"a budget of {least_gib(nbytes)} GiB of {words} ({memory.setting}, of the job or of the settings){beside}"


def _ssds_in_words(ssds: Ssds, nbytes: int) -> str:
    """Names the number of SSDs that have so much space, and the size with which no more of them are needed."""
    number, gib = math.ceil(nbytes / (ssds.capacity_gib * GIB)), least_gib(nbytes / ssds.count)
    if ssds.count == 1:
        return f"{number} SSDs like this one (or one of {gib} GiB)"
    return f"{number} SSDs like these (or {gib} GiB on each SSD)"


def shortfall_of(question: PlanQuestion, least: LeastMemory) -> Shortfall:
    """Returns what a job lacks. It must not fit."""
    limits = limits_for_plans(question)
    needs: dict[MemoryTier, Need] = {}
    for memory in MEMORIES:
        if math.isinf(limits.of(memory.tier)):
            continue  # the device uses the host's memory
        need = least.least(memory.tier, limits)
        # Where the other memory is just enough, what is left out of the programs may decide.
        if need is not None and least.fitting(limits.at_least(need.nbytes)) is not None:
            needs[memory.tier] = need
    shortfall = Shortfall(question=question, needs=needs)
    if any(shortfall.missing.values()):
        return shortfall
    return _together(question, least, limits)


def _together(question: PlanQuestion, least: LeastMemory, limits: Bytes) -> Shortfall:
    """Returns the cheapest combination, of which no part can be smaller."""
    need = least.cheapest(limits, _PRICES)
    enough = limits.at_least(need.nbytes)
    for tier in MemoryTier:
        if not math.isinf(limits.of(tier)) and enough.of(tier) > limits.of(tier):
            need = least.least(tier, enough) or need
            enough = limits.at_least(need.nbytes)
    tiers = [tier for tier in MemoryTier if not math.isinf(limits.of(tier))]
    return Shortfall(question=question, needs=dict.fromkeys(tiers, need), is_together=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastGpu:
    """The least GPU memory with which a job has a plan. `nbytes`: of the card, with its driver's."""

    nbytes: int
    reason: str  # the largest parts of it
    needs_more: bool  # on this machine other memory is short, and this is the least with enough of that

    @property
    def gib(self) -> float:
        """The least memory in GiB."""
        return self.nbytes / GIB


def least_gpu(question: PlanQuestion, least: LeastMemory) -> LeastGpu | None:
    """Returns the least GPU memory of a job on its machine and what sets it, or None without a GPU.

    If the machine has too little other memory for any plan, it is the least with enough of it.
    """
    if not question.has_gpu:
        return None
    limits = limits_for_plans(question)
    need = least.least(MemoryTier.DEVICE, limits)
    unlimited = replace(limits, host=math.inf, ssd=math.inf)
    needs_more = need is None
    need = need or least.least(MemoryTier.DEVICE, unlimited)
    assert need is not None, "with enough memory of every kind each job has a plan"
    nbytes = needed_nbytes(question, need.nbytes, MemoryTier.DEVICE) + DRIVER_NBYTES
    return LeastGpu(nbytes=nbytes, reason=what_takes_memory(need, on_gpu=True), needs_more=needs_more)


def with_least_gpu(report: PlanReport, gpu: LeastGpu | None) -> PlanReport:
    """Returns the report with the least GPU memory of the job; None: the device is the CPU."""
    if gpu is None:
        return report
    reason = f"{gpu.reason}; this is with enough of the other memory" if gpu.needs_more else gpu.reason
    return replace(report, least_gpu_gib=gpu.gib, least_gpu_reason=reason)


def what_takes_memory(need: Need, *, on_gpu: bool) -> str:
    """Names the largest parts of the device memory of a plan."""
    size, costs = need.placement.group_size or 1, need.frontier.costs
    at_once = "one micro-batch" if size == 1 else f"{size} micro-batches"
    number = f"num_microbatches={need.job.num_microbatches}, {at_once} at a time"
    what = "all blocks" if costs.streams_ends else "layers"
    in_pieces = f" and {what} in pieces" if costs.streams else ""
    if costs.job.cut is not None:
        in_pieces += f" of at most {costs.job.cut} elements (cut_matrices)" if costs.streams else ""
    if need.on_device is None:
        return f"the layers are hypothetical, so its parts are not counted; with {number}{in_pieces}"
    parts = need.on_device.in_words(on_gpu=on_gpu)
    driver = f"; the GPU's driver takes {bytes_text(DRIVER_NBYTES)} more" if on_gpu else ""
    return f"with {number}{in_pieces} the device's memory goes to: {parts}{driver}"


def extremes(numbers: Iterable[int]) -> list[int]:
    """Returns the largest and the smallest number of micro-batches.

    One of them needs least: with the smallest, gradients may need no sums; with the largest, an operation is smallest.
    """
    every = list(numbers)
    return list(dict.fromkeys((every[-1], every[0])))
