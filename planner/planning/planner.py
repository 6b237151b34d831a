"""Plans a job before it exists: from a model and a machine to times, memory peaks, choices and reasons."""

import contextlib
import copy
import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from windlass.engine.data import WIDTH_GRANULE
from windlass.engine.lanes import rounded_to_lanes
from windlass.engine.memory_estimate import DryRunResult, device_need
from windlass.engine.memory_plan import (
    DeviceNeed,
    ExampleLengths,
    MemoryTier,
    Plan,
    allocatable_nbytes,
    evaluation_shapes,
)
from windlass.engine.model import ModelLayout
from windlass.engine.training_config import TrainingConfig
from windlass.planner.cost import ModelProfile, Speeds, Ways, for_lengths, speeds_of, ways_of_layer
from windlass.planner.hardware import Hardware
from windlass.planner.planning.feasibility import (
    numbers_of_microbatches,
    what_takes_memory,
    what_would_fit,
    with_enough_device_memory,
    with_part,
)
from windlass.planner.planning.rate_correction import Correction
from windlass.planner.planning.report import ExampleTokens, PlanReport, report_of, with_limits
from windlass.planner.profiling import BlockTimes, MeasuredBlocks, Profiler, TimingCache, measure_blocks, with_times
from windlass.planner.simulation import simulated_step_s
from windlass.planner.solver import (
    DoesNotFitError,
    Limits,
    MarginSearch,
    PlannedJob,
    Solution,
    budgets_of,
    candidates,
    solve_job,
)

# Minimum share by which a change must shorten a step to be worth mentioning.
WORTH = 0.05
# Number of plans to simulate, the best ones by the cost model.
_MOST_SIMULATED = 4
# Maximum number of times that the program is solved again with a smaller limit, because the exact count was larger.
_MAX_CORRECTIONS = 10
# Share of the device memory: the search for the right limit stops when its interval is smaller.
_NEAR = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """A job on a machine. `config`: a transformers config."""

    config: Any
    hardware: Hardware
    training: TrainingConfig
    chooses_microbatches: bool = False  # search the fastest number of micro-batches, instead of the config's
    lengths: ExampleLengths | None = None  # of the job's data; None: every example is as long as `sequence_length`
    num_validation_examples: int = 0  # an evaluation computes as many micro-batches at once as a step
    num_ranks: int = 1  # GPU workers, each with a GPU of its own
    chooses_ranks: bool = False  # `choose_gpus` searches the fastest number up to `num_ranks`
    num_optimizers: int = 1
    num_layers: int | None = None  # pretend this number of layers, all like the first; None: those of the config
    host_memory_nbytes: int | None = None  # budget of the arena; None: all of the machine's
    device_memory_nbytes: int | None = None  # budget; None: all of the device's
    measures: bool = False  # time the blocks on this machine's device; `hardware` must then describe this machine
    kept_times: TimingCache | None = None  # stored block times; None: blocks are always measured
    ways: Ways = ways_of_layer  # options for a layer's activations
    # From the job's own steps, with the same number of micro-batches. If set, no blocks are measured.
    correction: Correction = field(default_factory=Correction)

    def changed(self, **training: Any) -> "PlanQuestion":
        """Returns the question for a job with some fields of the training config changed.

        If they include `num_microbatches`, the number is not chosen by the planner, and lanes and GPUs that would have
        no micro-batch are left out.
        """
        chooses = self.chooses_microbatches and "num_microbatches" not in training
        number = training.get("num_microbatches", self.training.num_microbatches)
        training = {"lanes": min(self.training.lanes, number)} | training
        num_ranks = min(self.num_ranks, number)
        training_then = replace(self.training, **training)
        return replace(self, training=training_then, num_ranks=num_ranks, chooses_microbatches=chooses)

    @property
    def least_microbatches(self) -> int:
        """The smallest number of micro-batches with which lanes are equal and no GPU is without one."""
        return rounded_to_lanes(self.num_ranks, self.training.lanes)

    @property
    def widest(self) -> int:
        """Tokens of the widest micro-batch that can occur.

        The engine pads a micro-batch to its longest example, not to `sequence_length`. If all examples are shorter, the
        plan needs no memory and no time for `sequence_length` tokens.
        """
        length = self.training.sequence_length
        return length if self.lengths is None else min(self.lengths.longest, length)

    @property
    def budgets(self) -> Limits:
        """The memory that the job may use: that of the machine, limited by the job's budgets."""
        return budgets_of(
            self.hardware,
            num_ranks=self.num_ranks,
            host_memory_nbytes=self.host_memory_nbytes,
            device_memory_nbytes=self.device_memory_nbytes,
        )

    @property
    def limits(self) -> Limits:
        """The memory that the job may allocate: its budgets, without what PyTorch's allocator reserves on a GPU."""
        budgets = self.budgets
        return replace(budgets, device_nbytes=allocatable_nbytes(budgets.device_nbytes)) if self.has_gpu else budgets

    @property
    def has_gpu(self) -> bool:
        """False if the device that computes is the CPU."""
        return self.hardware.gpus.count > 0

    @property
    def speeds(self) -> Speeds:
        """The machine's rates, with the correction by measured steps."""
        return self.correction.of_speeds(speeds_of(self.hardware, self.num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The report for the user and, if the job fits, the solution for the engine."""

    report: PlanReport
    solution: Solution | None = None
    layout: ModelLayout | None = None  # of the model's blocks; None also if the layers are hypothetical (`num_layers`)


def answer(question: PlanQuestion) -> Planned:
    """Returns the job's plan, or a report of the missing memory and of the nearest changes that fit."""
    profiles = Profiles(question)
    try:
        job, solution, step_s = fastest_plan(question, profiles)
    except DoesNotFitError as error:
        # Times do not matter here, so do not measure any.
        profiles = profiles.unmeasured()
        error = with_enough_device_memory(question, profiles, error)
        reasons = (str(error), *what_takes_memory(question, profiles, error), *what_would_fit(question, profiles))
        missing = {tier.value: error.missing[tier] for tier in MemoryTier}
        report = PlanReport(feasible=False, reasons=reasons, missing_bytes=missing)
        return Planned(report=with_limits(report, question.budgets))
    return planned(question, job, solution, profiles, step_s=step_s)


def planned(
    question: PlanQuestion,
    job: PlannedJob,
    solution: Solution,
    profiles: "Profiles",
    *,
    step_s: float | None = None,
    advises: bool = True,
) -> Planned:
    """Builds the answer from a solution. `step_s`: simulated. `advises`: also report what would be faster."""
    report = report_of(job, solution, is_cpu=not question.has_gpu, step_s=step_s)
    report = replace(with_limits(report, question.budgets), example_tokens=_tokens_of(question))
    if advises:
        report = replace(report, reasons=(*report.reasons, *_what_is_faster(question, job, solution)))
    return Planned(report=report, solution=solution, layout=None if question.num_layers else profiles.layout)


def _tokens_of(question: PlanQuestion) -> ExampleTokens:
    lengths = question.lengths
    return ExampleTokens(
        limit=question.training.sequence_length,
        widest=question.widest,
        mean=question.training.sequence_length
        if lengths is None
        else lengths.cut(question.training.sequence_length).mean,
        of_data=lengths is not None,
    )


def planned_job(question: PlanQuestion, profile: ModelProfile, num_microbatches: int) -> PlannedJob:
    """Builds the solver's view of the job."""
    return PlannedJob(
        model=profile,
        training=replace(question.training, num_microbatches=num_microbatches),
        num_ranks=question.num_ranks,
        num_optimizers=question.num_optimizers,
        ways=question.ways,
    )


class Profiles:
    """Profiles of one model for micro-batches of any shape. Times are measured once for each shape."""

    def __init__(self, question: PlanQuestion) -> None:
        self._measures, self._question = question.measures, question
        self._profiler = Profiler(
            question.config,
            question.training.precision,
            for_gpu=question.has_gpu,
            head_slices=question.training.head_slices,
        )
        self._untimed: dict[tuple[int, int], ModelProfile] = {}
        self._known: dict[tuple[int, int], ModelProfile] = {}
        self._of_lengths: dict[tuple[int, ExampleLengths], ModelProfile] = {}
        self._rehearsed = DryRunResult()

    def unmeasured(self) -> "Profiles":
        """Returns a copy that measures nothing more, and uses the times that are known."""
        profiles = copy.copy(self)
        profiles._measures = False
        return profiles

    def corrected(self, question: PlanQuestion) -> "Profiles":
        """Returns a copy with the times of the question's `correction`, which measures nothing more."""
        profiles = self.unmeasured()
        profiles._question, profiles._known, profiles._of_lengths = question, {}, {}
        return profiles

    @property
    def layout(self) -> ModelLayout:
        """The layout of the model's blocks."""
        return self._profiler.layout

    def device_need(self, question: PlanQuestion, job: PlannedJob, solution: Solution) -> DeviceNeed:
        """Returns the device memory of a planned job, as its GPU worker allocates it."""
        return self.device_need_of_plan(question, job, solution.plan)

    def device_need_of_plan(self, question: PlanQuestion, job: PlannedJob, plan: Plan) -> DeviceNeed:
        """Returns the same as `device_need`, for a plan."""
        shape = (job.model.num_examples, job.model.num_tokens)
        lengths = question.lengths
        return device_need(
            self._profiler.rehearsed,
            plan,
            [shape] * plan.group_size,
            formats=job.training.formats,
            grad_precision=job.training.grad_precision,
            num_microbatches=job.num_microbatches,
            num_lanes=job.training.lanes,
            num_ahead=job.num_prefetched,
            max_tokens=shape[0] * question.training.sequence_length,  # the size that the engine allocates
            head_slices=job.training.head_slices,
            # Evaluation examples may be longer than training examples.
            evaluation_shapes=evaluation_shapes(
                question.num_validation_examples, question.training.sequence_length, shape[0], job.num_microbatches
            )
            if lengths is None
            else lengths.evaluation_shapes(shape[0], job.num_microbatches),
            on_gpu=question.has_gpu,
            rehearsed=self._rehearsed,
        )

    def job(self, question: PlanQuestion, num_microbatches: int) -> PlannedJob:
        """Builds the solver's view of the job, with the given number of micro-batches."""
        profile = self._of_job(question, -(-question.training.batch_size // num_microbatches))
        if question.num_layers is not None:
            profile = profile.with_num_layers(question.num_layers)
        return planned_job(question, profile, num_microbatches)

    def solve(self, question: PlanQuestion, num_microbatches: int) -> Solution:
        """Returns the best solution for a number of micro-batches; see `_solve`."""
        return _solve(question, num_microbatches, self)[1]

    def of(self, num_examples: int, num_tokens: int) -> ModelProfile:
        """Returns the profile for micro-batches of this shape."""
        shape = (num_examples, num_tokens)
        if shape not in self._known:
            self._known[shape] = self._question.correction.of_model(self._timed(*shape))
        return self._known[shape]

    def _of_job(self, question: PlanQuestion, num_examples: int) -> ModelProfile:
        """Returns the profile for a job's micro-batches: memory for the widest one, time for the mean one."""
        if question.lengths is None:
            return self.of(num_examples, question.training.sequence_length)
        lengths = question.lengths.cut(question.training.sequence_length)
        key = (num_examples, lengths)
        if key not in self._of_lengths:
            widest = self._by_shapes(num_examples, question.widest)
            near_mean = self._timed(num_examples, min(_near(lengths.mean), question.widest))
            self._of_lengths[key] = self._question.correction.of_model(for_lengths(widest, near_mean, lengths))
        return self._of_lengths[key]

    def _by_shapes(self, num_examples: int, num_tokens: int) -> ModelProfile:
        shape = (num_examples, num_tokens)
        if shape not in self._untimed:
            self._untimed[shape] = self._profiler.profile(*shape)
        return self._untimed[shape]

    def _timed(self, num_examples: int, num_tokens: int) -> ModelProfile:
        """Returns the profile with measured block times, if there are any."""
        profile = self._by_shapes(num_examples, num_tokens)
        times = self._times(profile)
        return profile if times is None else with_times(profile, times)

    def _times(self, profile: ModelProfile) -> dict[int, BlockTimes] | None:
        """Returns measured or stored block times. None: times must be computed from the machine's rates."""
        question = self._question
        device = torch.device("cuda", 0) if question.has_gpu else torch.device("cpu")
        num_microbatches = -(-question.training.batch_size // profile.num_examples)
        sums_grads, has_lanes = num_microbatches > 1, question.training.lanes > 1
        training = replace(question.training, num_microbatches=num_microbatches, lanes=1)

        def measure() -> MeasuredBlocks:
            return measure_blocks(
                profile,
                question.config,
                training.precision,
                device,
                sums_grads=sums_grads,
                has_lanes=has_lanes,
                grad_precision=training.grad_precision,
                head_slices=training.head_slices,
            )

        kept = question.kept_times
        facts = {
            "shape": (profile.num_examples, profile.num_tokens),
            "precision": training.precision,
            "sums_grads": sums_grads,
            "has_lanes": has_lanes,
            "grad_precision": training.grad_precision,
            "head_slices": training.head_slices,
            "device": device.type,
        }
        if not self._measures:
            return None if kept is None else kept.known(question.config, facts)
        with contextlib.suppress(RuntimeError, MemoryError):  # too large to measure here
            return measure().times if kept is None else kept.of(question.config, facts, measure)
        return None


def _near(mean: float) -> int:
    """Rounds a mean width to one that the engine computes, so that other jobs can use the stored times."""
    return max(1, round(mean / WIDTH_GRANULE)) * WIDTH_GRANULE


def _solve(
    question: PlanQuestion, num_microbatches: int, profiles: Profiles
) -> tuple[PlannedJob, Solution, list[Solution]]:
    """Returns the best solution by the cost model, with exact device memory, and further candidates that may not fit.

    The program's estimate is lower than the exact count. The difference is subtracted from the program's memory limit
    until the solution fits.
    """
    job = profiles.job(question, num_microbatches)
    speeds, limits = question.speeds, question.limits
    search = MarginSearch(near=_NEAR * limits.device_nbytes)
    best: tuple[PlannedJob, Solution, list[Solution]] | None = None
    for _ in range(_MAX_CORRECTIONS):
        try:
            solution, *others = candidates(job, speeds, _less(limits, search.margin, speeds))
        except DoesNotFitError:
            if not search.margin:
                raise
            if search.found_none():
                continue
            break
        if question.num_layers is not None:  # hypothetical layers cannot be counted exactly
            return job, solution, others
        exact, excess = _counted(question, profiles, job, solution)
        left_out = exact.nbytes[MemoryTier.DEVICE] - solution.nbytes[MemoryTier.DEVICE]
        if best is not None:
            return (job, exact, others) if excess <= 0 and exact.cost < best[1].cost else best
        if excess > 0:
            search.exceeded(excess, left_out)
            continue
        best = job, exact, others
        if not search.fitted(left_out):  # else more was subtracted than it needs, so a better one may exist
            return best
    if best is not None:
        return best
    # On a CPU the device's memory is the host's, unless a budget makes it smaller.
    short = MemoryTier.HOST if speeds.shares_cores and limits.device_nbytes >= limits.host_nbytes else MemoryTier.DEVICE
    raise DoesNotFitError(lambda: dict.fromkeys(MemoryTier, 0) | {short: int(search.least_excess)})


def _less(limits: Limits, margin: float, speeds: Speeds) -> Limits:
    """Returns the limits with less device memory. On a CPU, that is the host's memory."""
    less = replace(limits, device_nbytes=limits.device_nbytes - margin)
    return replace(less, host_nbytes=limits.host_nbytes - margin) if speeds.shares_cores else less


def _counted(question: PlanQuestion, profiles: Profiles, job: PlannedJob, solution: Solution) -> tuple[Solution, float]:
    """Returns the solution with exact device memory, and the bytes by which it exceeds the limit."""
    shares_cores, limits = solution.costs.speeds.shares_cores, question.limits
    need = profiles.device_need(question, job, solution)
    # The CPU finishes its copies before it computes the next layer, so no bytes are on their way out then.
    nbytes = need.settled_nbytes if shares_cores else need.nbytes
    together = solution.costs.num_devices_in_host * nbytes + solution.plan.arena_nbytes if shares_cores else 0
    excess = max(nbytes - limits.device_nbytes, together - limits.host_nbytes)
    return replace(solution, nbytes={**solution.nbytes, MemoryTier.DEVICE: nbytes}), excess


def best_plan(question: PlanQuestion, profiles: Profiles) -> tuple[PlannedJob, Solution]:
    """Returns the best plan by the cost model alone.

    Raises:
        DoesNotFitError: nothing fits.
    """
    job, solution, _ = min(_by_microbatches(question, profiles), key=lambda result: result[1].cost)
    return job, solution


def fastest_plan(question: PlanQuestion, profiles: Profiles) -> tuple[PlannedJob, Solution, float | None]:
    """Simulates the best plans by the cost model, and returns the fastest one with its step time.

    The step time is None for a model with hypothetical layers, which cannot be simulated. The cost model gives a lower
    bound, so a plan is skipped if its bound is above the best simulated time.

    Raises:
        DoesNotFitError: nothing fits.
    """
    if question.num_layers is not None:
        return *best_plan(question, profiles), None
    options = [
        (job, candidate, candidate is solution)
        for job, solution, others in _by_microbatches(question, profiles)
        for candidate in (solution, *others)
    ]
    best: tuple[PlannedJob, Solution, float] | None = None
    num_left = _MOST_SIMULATED
    for job, option, is_counted in sorted(options, key=lambda option: option[1].cost):
        if best is not None and (option.step_s >= best[2] or not num_left):
            break
        solution, excess = (option, 0.0) if is_counted else _counted(question, profiles, job, option)
        if excess > 0:
            continue
        num_left -= 1
        step_s = promised_step_s(question, profiles, solution)
        if best is None or step_s < best[2]:
            best = job, solution, step_s
    assert best is not None, "the first of each number of micro-batches fits"
    return best


def promised_step_s(question: PlanQuestion, profiles: Profiles, solution: Solution) -> float:
    """Returns the simulated step time, or the cost model's bound if that is larger."""
    num_cores = len(os.sched_getaffinity(0))
    simulated_s = simulated_step_s(solution, profiles.layout, num_cores=num_cores)
    return max(solution.step_s, simulated_s)


def _by_microbatches(question: PlanQuestion, profiles: Profiles) -> list[tuple[PlannedJob, Solution, list[Solution]]]:
    """Solves for each number of micro-batches. If none is requested, doubles it while the solution improves."""
    results: list[tuple[PlannedJob, Solution, list[Solution]]] = []
    missing: DoesNotFitError | None = None
    for number in numbers_of_microbatches(question):
        try:
            results.append(_solve(question, number, profiles))
        except DoesNotFitError as error:
            missing = error
        else:
            if len(results) > 1 and results[-1][1].cost >= results[-2][1].cost:
                break
    if not results:
        assert missing is not None, "a batch has at least one example"
        raise missing
    return results


def _what_is_faster(question: PlanQuestion, job: PlannedJob, solution: Solution) -> list[str]:
    """Estimates the gain from twice as much of each resource."""
    hardware = question.hardware
    ssds, host, gpus, pcie = hardware.ssds, hardware.host, hardware.gpus, hardware.pcie
    combined = None if ssds.combined_gb_per_s is None else 2 * ssds.combined_gb_per_s
    twice: dict[str, dict[str, Any]] = {
        "twice as many SSDs": {"ssds": with_part(ssds, count=2 * ssds.count, combined_gb_per_s=combined)},
        "twice the host memory": {"host": with_part(host, memory_gib=2 * host.memory_gib)},
        "twice the GPU memory": {"gpus": with_part(gpus, memory_gib=2 * gpus.memory_gib)},
        "host memory that is twice as fast": {"host": with_part(host, memory_gb_per_s=2 * host.memory_gb_per_s)},
        "a CPU that updates twice as fast": {"host": with_part(host, adam_params_per_s=2 * host.adam_params_per_s)},
        "a link twice as fast": {
            "pcie": with_part(
                pcie,
                h2d_gb_per_s=2 * pcie.h2d_gb_per_s,
                d2h_gb_per_s=2 * pcie.d2h_gb_per_s,
                duplex_gb_per_s=None if pcie.duplex_gb_per_s is None else 2 * pcie.duplex_gb_per_s,
            )
        },
        "a GPU that computes twice as fast": {"gpus": with_part(gpus, tflops=2 * gpus.tflops)},
    }
    reasons = []
    for words, update in twice.items():
        changed = with_part(hardware, **update)
        faster = replace(question, hardware=changed)
        speedup = changed.gpus.tflops / gpus.tflops
        faster_job = job if speedup == 1 else replace(job, model=job.model.sped_up(speedup))
        try:
            other = solve_job(faster_job, faster.speeds, faster.limits)
        except DoesNotFitError:  # it fits here, so it fits there; only the search for a better plan failed
            continue
        if other.step_s < (1 - WORTH) * solution.step_s:
            reasons.append(f"with {words} a step takes about {1 - other.step_s / solution.step_s:.0%} less")
    return reasons
