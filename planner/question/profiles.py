"""Profiles of a model for the micro-batches that a plan may have, and the device memory of a planned job."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace

from windlass.engine.memory_estimate import Passes, device_need
from windlass.engine.memory_plan import (
    RECOMPUTE_ALL,
    WIDTH_GRANULE,
    BlockActivations,
    DeviceNeed,
    ExampleLengths,
    MemoryTier,
    Placement,
    Plan,
    UnitNeed,
    evaluation_shapes,
)
from windlass.engine.model import ModelLayout
from windlass.engine.slices import num_slice_tokens
from windlass.engine.training_config import TrainingConfig
from windlass.planner.cost import ModelProfile, for_lengths
from windlass.planner.profiling import BlockTimes, MeasuredBlocks, with_times
from windlass.planner.question.kept_shapes import KeptShapes
from windlass.planner.question.question import PlanQuestion
from windlass.planner.solver import (
    PlannedJob,
    Solution,
    StepCosts,
    cuts_of,
    solution_of,
)
from windlass.storage.ids import BlockIndex

# Seconds of a pass, by the machine's rates, above which a micro-batch is measured with fewer examples. So long a pass
# keeps all cores busy, so a larger one takes longer in proportion.
_LONG_ENOUGH_S = 2.0


def planned_job(
    question: PlanQuestion,
    profile: ModelProfile,
    num_microbatches: int,
    *,
    with_cut: Callable[[ModelProfile, int], ModelProfile] = lambda model, cut: model,
) -> PlannedJob:
    """Builds the solver's view of the job. `with_cut`: see PlannedJob."""
    largest = max((profile.layers[block - 1].largest_param_numel for block in profile.unshared_layers), default=0)
    return PlannedJob(
        model=profile,
        training=replace(question.training, num_microbatches=num_microbatches),
        num_ranks=question.num_ranks,
        num_optimizers=question.num_optimizers,
        ways=question.ways,
        chooses_order=question.chooses_order,
        cuts=cuts_of(largest) if question.chooses_cut else (),
        with_cut=with_cut,
    )


class Profiles:
    """Profiles of one model for micro-batches of any shape. Times are measured once for each shape."""

    def __init__(self, question: PlanQuestion) -> None:
        self._measures, self._question = question.measures, question
        kept = question.kept_shapes or KeptShapes()
        self._shapes = kept.of(
            question.config, question.training.precision, question.kept_facts_dir, on_trace=question.on_trace
        )
        self._known: dict[tuple[int, int], ModelProfile] = {}
        self._of_lengths: dict[tuple[int, ExampleLengths], ModelProfile] = {}
        self._measured: dict[tuple[object, ...], dict[int, BlockTimes]] = {}  # by all that they depend on
        self._speedup = 1.0

    def unmeasured(self) -> "Profiles":
        """Returns profiles that measure nothing more, and use the times that are known."""
        if not self._measures:
            return self
        profiles = copy.copy(self)
        profiles._measures = False
        # Else profiles without times would be taken for measured ones.
        profiles._known, profiles._of_lengths = dict(self._known), dict(self._of_lengths)
        return profiles

    def corrected(self, question: PlanQuestion) -> "Profiles":
        """Returns a copy with the times of the question's `correction`, which measures nothing more."""
        profiles = copy.copy(self.unmeasured())
        profiles._question, profiles._known, profiles._of_lengths = question, {}, {}
        return profiles

    def of_question(self, question: PlanQuestion, *, speedup: float = 1.0) -> "Profiles":
        """Returns a copy for another question about the same model. `speedup`: of a device, over the measured one."""
        profiles = copy.copy(self)
        profiles._question, profiles._known, profiles._of_lengths, profiles._speedup = question, {}, {}, speedup
        return profiles

    @property
    def layout(self) -> ModelLayout:
        """The layout of the model's blocks."""
        return self._shapes.facts.layout

    def device_need(self, question: PlanQuestion, job: PlannedJob, solution: Solution) -> DeviceNeed:
        """Returns the device memory of a planned job, as its GPU worker allocates it."""
        return self.device_need_of_plan(question, job, solution.plan)

    def left_out_nbytes(self, question: PlanQuestion, costs: StepCosts) -> float:
        """Returns the bytes of device memory that the cost model leaves out of a plan whose layers are all recomputed.

        Plans with the same buffers and group size need them, too. They are sums in fp32, hidden states and constants.
        """
        if any(
            RECOMPUTE_ALL not in {way.choice for way in kind.activations} for kind in costs.kinds() if not kind.tiers
        ):
            return 0.0
        solution = _recomputing_all(costs)
        need = self.device_need_of_plan(question, costs.job, solution.plan, evaluates=False)
        return need.nbytes - solution.nbytes[MemoryTier.DEVICE]

    def lasting_nbytes(self, question: PlanQuestion, costs: StepCosts) -> int:
        """Returns the bytes of device memory that all plans with the same buffers use at all times."""
        return self.device_need_of_plan(
            question, costs.job, _recomputing_all(costs).plan, evaluates=False
        ).lasting_nbytes

    def needs_of_ways(self, job: PlannedJob) -> list[dict[BlockActivations, UnitNeed]]:
        """Returns the device memory of one micro-batch of a layer by its activations, for each kind of layers."""
        passes = Passes(
            num_examples=job.model.num_examples,
            num_tokens=job.model.num_tokens,
            grad_precision=job.training.grad_precision,
            is_summed=job.num_microbatches > 1,
            head_slices=job.training.head_slices,
            cut_matrices=job.cut,
        )
        needs = []
        for layer, blocks in job.model.blocks_of_layers.items():
            ways, of_layer = list(job.ways(layer)), dict[BlockActivations, UnitNeed]()
            for start in range(0, len(ways), len(blocks)):  # as many at once as there are layers of this kind
                some = ways[start : start + len(blocks)]
                choices = {BlockIndex(block): way.choice for block, way in zip(blocks, some, strict=False)}
                units = self._shapes.facts.needs(choices, passes).units
                of_layer |= {choice: units[block] for block, choice in choices.items()}
            needs.append(of_layer)
        return needs

    def device_need_of_plan(
        self, question: PlanQuestion, job: PlannedJob, plan: Plan, *, evaluates: bool = True
    ) -> DeviceNeed:
        """Returns the same as `device_need`, for a plan. `evaluates`: the memory of evaluations counts, too."""
        shape = (job.model.num_examples, job.model.num_tokens)
        lengths = question.lengths_in(job.num_microbatches)
        return device_need(
            self._shapes.facts,
            plan,
            [shape] * plan.group_size,
            formats=job.training.formats,
            grad_precision=job.training.grad_precision,
            num_microbatches=job.num_microbatches,
            num_lanes=job.training.lanes,
            num_ahead=job.num_prefetched,
            max_tokens=shape[0] * question.training.sequence_length,  # the size that the engine allocates
            head_slices=job.training.head_slices,
            cut_matrices=job.cut,
            # Evaluation examples may be longer than training examples.
            evaluation_shapes=()
            if not evaluates
            else evaluation_shapes(
                question.num_validation_examples, question.training.sequence_length, shape[0], job.num_microbatches
            )
            if lengths is None
            else lengths.evaluation_shapes(shape[0], job.num_microbatches),
            on_gpu=question.has_gpu,
            layout=self._layout_of(job),
            num_groups_in_flight=job.num_groups_in_flight,
        )

    def _layout_of(self, job: PlannedJob) -> ModelLayout:
        """Returns the layout of the model's blocks as the job's box sees it."""
        own = job.model.own
        return self.layout if own is None else self.layout.of_blocks(min(own), max(own) + 1)

    def job(self, question: PlanQuestion, num_microbatches: int) -> PlannedJob:
        """Builds the solver's view of the job, with the given number of micro-batches."""
        profile = self._of_job(question, num_microbatches)
        if question.num_layers is not None:
            profile = profile.with_num_layers(question.num_layers)
        if self._speedup != 1:
            profile = profile.sped_up(self._speedup)

        def with_cut(model: ModelProfile, cut: int) -> ModelProfile:
            return model.with_bytes_of(self._by_shapes(model.num_examples, model.num_tokens, cut))

        if question.training.cut_matrices is not None:
            profile = with_cut(profile, question.training.cut_matrices)
        job = planned_job(question, profile, num_microbatches, with_cut=with_cut)
        slice_tokens = num_slice_tokens(question.training.head_slices, self._shapes.facts.vocab_size)
        num_tokens = profile.num_examples * question.training.sequence_length  # the size that the engine allocates
        return replace(job, num_head_slices=-(-num_tokens // slice_tokens))

    def of(self, num_examples: int, num_tokens: int) -> ModelProfile:
        """Returns the profile for micro-batches of this shape."""
        shape = (num_examples, num_tokens)
        if shape not in self._known:
            self._known[shape] = self._question.correction.of_model(self._timed(*shape))
        return self._known[shape]

    def _of_job(self, question: PlanQuestion, num_microbatches: int) -> ModelProfile:
        """Returns the profile for a job's micro-batches: memory for the widest one, time for the mean one."""
        num_examples = -(-question.training.batch_size // num_microbatches)
        lengths = question.lengths_in(num_microbatches)
        if lengths is None:
            return self.of(num_examples, question.training.sequence_length)
        lengths = lengths.cut(question.training.sequence_length)
        key = (num_examples, lengths)
        if key not in self._of_lengths:
            widest = self._by_shapes(num_examples, question.widest)
            near_mean = self._timed(num_examples, min(_near(lengths.mean), question.widest))
            self._of_lengths[key] = self._question.correction.of_model(for_lengths(widest, near_mean, lengths))
        return self._of_lengths[key]

    def _by_shapes(self, num_examples: int, num_tokens: int, cut_matrices: int | None = None) -> ModelProfile:
        return self._shapes.profile(
            num_examples,
            num_tokens,
            for_gpu=self._question.has_gpu,
            head_slices=self._question.training.head_slices,
            cut_matrices=cut_matrices,
        )

    def _timed(self, num_examples: int, num_tokens: int) -> ModelProfile:
        """Returns the profile with measured block times, if there are any.

        Large micro-batches have the times of smaller ones, which are in proportion to their examples: those of a large
        model would else take minutes and more memory than the job itself.
        """
        profile = self._by_shapes(num_examples, num_tokens)
        num_microbatches = -(-self._question.training.batch_size // num_examples)
        num_measured = self._num_measured(profile)
        measured = profile if num_measured == num_examples else self._by_shapes(num_measured, num_tokens)
        times = self._times(measured, num_microbatches)
        if times is None:
            return profile
        factor = num_examples / num_measured
        return with_times(profile, times if factor == 1 else {at: found.longer(factor) for at, found in times.items()})

    def _num_measured(self, profile: ModelProfile) -> int:
        """Returns the number of examples to measure, whose pass takes about `_LONG_ENOUGH_S` at most."""
        different = {id(layer): layer for layer in profile.layers}.values()  # equal ones are one object
        num_flops = 3 * (profile.head.num_flops + sum(layer.num_flops for layer in different))
        pass_s = num_flops / self._question.speeds.device_flops
        return max(1, min(profile.num_examples, int(profile.num_examples * _LONG_ENOUGH_S / pass_s)))

    def _times(self, profile: ModelProfile, num_microbatches: int) -> dict[int, BlockTimes] | None:
        """Returns measured or stored block times. None: times must be computed from the machine's rates."""
        question = self._question
        sums_grads, has_lanes = num_microbatches > 1, question.training.lanes > 1
        training = replace(question.training, num_microbatches=num_microbatches, lanes=1)

        kept = question.kept_times
        facts = {
            "shape": (profile.num_examples, profile.num_tokens),
            "precision": training.precision,
            "sums_grads": sums_grads,
            "has_lanes": has_lanes,
            "grad_precision": training.grad_precision,
            "head_slices": training.head_slices,
            "device": "cuda" if question.has_gpu else "cpu",
        }
        key = tuple(facts.values())
        known = self._measured.get(key) or (None if kept is None else kept.known(question.config, facts))
        if known is not None or not self._measures or not self._has_device() or self._is_too_large(profile):
            return known

        def measure() -> MeasuredBlocks:
            return self._measure(profile, training, sums_grads=sums_grads, has_lanes=has_lanes)

        with contextlib.suppress(RuntimeError, MemoryError):  # too large to measure here
            times = measure().times if kept is None else kept.of(question.config, facts, measure)
            self._measured[key] = times
            return times
        return None

    def _is_too_large(self, profile: ModelProfile) -> bool:
        """Returns whether the params and the gradient of a block are more than the job may have on its device."""
        formats = self._question.training.formats
        numel = max(block.numel for block in profile.blocks)
        nbytes = numel * (formats.precision.itemsize + self._question.training.grad_precision.itemsize)
        return nbytes > self._question.limits.device_nbytes

    def _has_device(self) -> bool:
        """Returns whether this process can use the device that the job will compute on."""
        if not self._question.has_gpu:
            return True
        import torch

        return torch.cuda.is_available()

    def _measure(
        self, profile: ModelProfile, training: TrainingConfig, *, sums_grads: bool, has_lanes: bool
    ) -> MeasuredBlocks:
        """Measures block times as a job's GPU worker would compute them."""
        import torch

        from windlass.engine.device import retain_freed_memory
        from windlass.planner.profiling import loaded, measure_blocks

        question = self._question
        if question.measure_threads is not None:
            torch.set_num_threads(question.measure_threads)
            if not question.has_gpu:
                retain_freed_memory()
        return measure_blocks(
            profile,
            loaded(question.config),
            training.precision,
            torch.device("cuda", 0) if question.has_gpu else torch.device("cpu"),
            sums_grads=sums_grads,
            has_lanes=has_lanes,
            grad_precision=training.grad_precision,
            head_slices=training.head_slices,
        )


def _recomputing_all(costs: StepCosts) -> Solution:
    """Returns the plan whose layers are all recomputed, with no states and no params in memory."""
    placement = Placement(
        activations=(RECOMPUTE_ALL,) * len(costs.job.model.layers),
        group_size=costs.group_size,
        streamed_blocks=costs.streamed_layers,
        num_grad_buffers=costs.num_grad_buffers,
        streams_grads=costs.streams_grads,
        streams_ends=costs.streams_ends,
        num_cached_params=0,
    )
    return solution_of(costs, placement)


def _near(mean: float) -> int:
    """Rounds a mean width to one that the engine computes, so that other jobs can use the stored times."""
    return max(1, round(mean / WIDTH_GRANULE)) * WIDTH_GRANULE
