"""Profiles of a model for the micro-batches that a plan may have, and the device memory of a planned job."""

import copy
from collections.abc import Callable, Iterable, Iterator
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
from windlass.planner.cost import ModelProfile, for_lengths
from windlass.planner.profiling import measured_layers, with_times
from windlass.planner.question.kept_shapes import KeptShapes
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.times_of_blocks import Times, TimesNeed, TimesOfBlocks, num_measured
from windlass.planner.solver import (
    PlannedJob,
    Solution,
    StepCosts,
    cuts_of,
    plan_of,
    solution_of,
)
from windlass.storage.ids import BlockIndex


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
        self._measures, self._question = question.measures_here, question
        kept = question.kept_shapes or KeptShapes()
        self._shapes = kept.of(
            question.config, question.training.precision, question.kept_facts_dir, on_trace=question.on_trace
        )
        self._known: dict[tuple[int, int], ModelProfile] = {}
        self._of_lengths: dict[tuple[int, ExampleLengths], ModelProfile] = {}
        # By micro-batches: the last job, and what it was made from. Searches for a question share what they know of it.
        self._jobs: dict[int, tuple[PlanQuestion, ModelProfile, PlannedJob]] = {}
        self._times = TimesOfBlocks()
        self._by_rates = False
        self._lacking: tuple[TimesNeed, ...] = ()
        self._speedup = 1.0

    def unmeasured(self) -> "Profiles":
        """Returns profiles that measure nothing more, and use the times that are known."""
        if not self._measures:
            return self
        profiles = copy.copy(self)
        profiles._measures = False
        # Else profiles without times would be taken for measured ones.
        profiles._known, profiles._of_lengths = dict(self._known), dict(self._of_lengths)
        profiles._jobs = dict(self._jobs)
        return profiles

    def by_rates(self, lacking: Iterable[TimesNeed] = ()) -> "Profiles":
        """Returns profiles whose times follow from the machine's rates, whatever times of blocks are known.

        `lacking`: the times for want of which a plan goes by rates, if they are left unmeasured.
        """
        profiles = copy.copy(self)
        profiles._by_rates, profiles._known, profiles._of_lengths, profiles._jobs = True, {}, {}, {}
        profiles._lacking = tuple(lacking)
        return profiles

    @property
    def lacking(self) -> tuple[TimesNeed, ...]:
        """See `by_rates`."""
        return self._lacking

    @property
    def is_by_rates(self) -> bool:
        """True for profiles of `by_rates`."""
        return self._by_rates

    def lacking_times(self, question: PlanQuestion, numbers: Iterable[int]) -> Iterator[TimesNeed]:
        """Yields what plans with these numbers of micro-batches need times for, if they are not known and can be.

        Some needs may have the same times. `question`: about the same model.
        """
        profiles = self.of_question(question)
        for number in numbers:
            _, need = profiles._need(*_timed_shape(question, number))
            if question.measures and self._times.known(need) is None and need.can_be_measured:
                yield need

    def measure(self, need: TimesNeed) -> None:
        """Measures times, for all profiles that were made from the same ones. They may be too large for it."""
        self._times.measured(need)

    def corrected(self, question: PlanQuestion) -> "Profiles":
        """Returns a copy with the times of the question's `correction`, which measures nothing more."""
        profiles = copy.copy(self.unmeasured())
        profiles._question, profiles._known, profiles._of_lengths, profiles._jobs = question, {}, {}, {}
        return profiles

    def of_question(self, question: PlanQuestion, *, speedup: float = 1.0) -> "Profiles":
        """Returns a copy for another question about the same model. `speedup`: of a device, over the measured one."""
        profiles = copy.copy(self)
        profiles._question, profiles._known, profiles._of_lengths, profiles._jobs = question, {}, {}, {}
        profiles._speedup = speedup
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
        solution = solution_of(costs, _recomputing_all(costs))
        need = self.device_need_of_plan(question, costs.job, solution.plan, evaluates=False)
        return need.nbytes - solution.nbytes[MemoryTier.DEVICE]

    def lasting_nbytes(self, question: PlanQuestion, costs: StepCosts) -> int:
        """Returns the bytes of device memory that all plans with the same buffers use at all times."""
        plan = plan_of(costs, _recomputing_all(costs), None)  # whether or not the job may have it
        return self.device_need_of_plan(question, costs.job, plan, evaluates=False).lasting_nbytes

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
        """Returns the solver's view of the job, with the given number of micro-batches."""
        profile = self._of_job(question, num_microbatches)
        known = self._jobs.get(num_microbatches)
        if known is not None and known[0] is question and known[1] is profile:
            return known[2]
        job = self._new_job(question, profile, num_microbatches)
        self._jobs[num_microbatches] = question, profile, job
        return job

    def _new_job(self, question: PlanQuestion, profile: ModelProfile, num_microbatches: int) -> PlannedJob:
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
            near_mean = self._timed(*_timed_shape(question, num_microbatches))
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
        profile, need = self._need(num_examples, num_tokens)
        times = self._times_for(need)
        if times is None:
            return profile
        factor = num_examples / need.profile.num_examples
        return with_times(profile, times if factor == 1 else {at: found.longer(factor) for at, found in times.items()})

    def _need(self, num_examples: int, num_tokens: int) -> tuple[ModelProfile, TimesNeed]:
        """Returns the profile without times, and the need for its times."""
        question, profile = self._question, self._by_shapes(num_examples, num_tokens)
        num_microbatches = -(-question.training.batch_size // num_examples)
        number = num_measured(num_examples, _pass_s(question, profile))
        measured = profile if number == num_examples else self._by_shapes(number, num_tokens)
        pass_s = _pass_s(question, measured)
        need = TimesNeed(question=question, profile=measured, num_microbatches=num_microbatches, pass_s=pass_s)
        return profile, need

    def _times_for(self, need: TimesNeed) -> Times | None:
        """Returns measured or stored times. None: times must be computed from the machine's rates."""
        if self._by_rates:
            return None
        known = self._times.known(need)
        if known is not None or not self._measures or not need.can_be_measured:
            return known
        return self._times.measured(need)


def _pass_s(question: PlanQuestion, profile: ModelProfile) -> float:
    """Returns the seconds of a measured pass by the machine's rates.

    A layer is measured in four ways. Together they compute about two forward passes again.
    """
    job = planned_job(question, profile, question.training.num_microbatches)
    costs = StepCosts(job=job, speeds=question.speeds, limits=question.limits, group_size=1, given_commit_every=1)
    ends_s = sum(sum(costs.compute_s(block)) for block in (profile.embedding, profile.head))
    layers_s = ((number, *costs.compute_s(layer)) for layer, number in measured_layers(profile))
    return ends_s + sum(number * (1.5 * forward_s + backward_s) for number, forward_s, backward_s in layers_s)


def _recomputing_all(costs: StepCosts) -> Placement:
    """Returns the placement whose layers are all recomputed, with no states and no params in memory."""
    return Placement(
        activations=(RECOMPUTE_ALL,) * len(costs.job.model.layers),
        group_size=costs.group_size,
        streamed_blocks=costs.streamed_layers,
        num_grad_buffers=costs.num_grad_buffers,
        streams_grads=costs.streams_grads,
        streams_ends=costs.streams_ends,
        num_cached_params=0,
    )


def _timed_shape(question: PlanQuestion, num_microbatches: int) -> tuple[int, int]:
    """Returns the examples and tokens of the micro-batch whose time counts: one of the mean width."""
    num_examples = -(-question.training.batch_size // num_microbatches)
    lengths, length = question.lengths_in(num_microbatches), question.training.sequence_length
    return num_examples, length if lengths is None else min(_near(lengths.cut(length).mean), question.widest)


def _near(mean: float) -> int:
    """Rounds a mean width to one that the engine computes, so that other jobs can use the stored times."""
    return max(1, round(mean / WIDTH_GRANULE)) * WIDTH_GRANULE
