"""Profiles of a model for the micro-batches that a plan may have, and the device memory of a planned job."""

import contextlib
import copy
from dataclasses import replace

import torch

from windlass.engine.data import WIDTH_GRANULE
from windlass.engine.memory_estimate import device_need
from windlass.engine.memory_plan import (
    DeviceNeed,
    ExampleLengths,
    Plan,
    evaluation_shapes,
)
from windlass.engine.model import ModelLayout
from windlass.planner.cost import ModelProfile, for_lengths
from windlass.planner.planning.kept_shapes import KeptShapes
from windlass.planner.planning.question import PlanQuestion
from windlass.planner.profiling import BlockTimes, MeasuredBlocks, Profiler, measure_blocks, with_times
from windlass.planner.solver import (
    PlannedJob,
    Solution,
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
        precision, head_slices = question.training.precision, question.training.head_slices
        self._shapes = (question.kept_shapes or KeptShapes()).of(
            question.config,
            (precision, question.has_gpu, head_slices),
            lambda: Profiler(question.config, precision, for_gpu=question.has_gpu, head_slices=head_slices),
        )
        self._known: dict[tuple[int, int], ModelProfile] = {}
        self._of_lengths: dict[tuple[int, ExampleLengths], ModelProfile] = {}
        self._speedup = 1.0

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

    def of_question(self, question: PlanQuestion, *, speedup: float = 1.0) -> "Profiles":
        """Returns a copy for another question about the same model. `speedup`: of a device, over the measured one."""
        profiles = copy.copy(self)
        profiles._question, profiles._known, profiles._of_lengths, profiles._speedup = question, {}, {}, speedup
        return profiles

    @property
    def layout(self) -> ModelLayout:
        """The layout of the model's blocks."""
        return self._shapes.profiler.layout

    def device_need(self, question: PlanQuestion, job: PlannedJob, solution: Solution) -> DeviceNeed:
        """Returns the device memory of a planned job, as its GPU worker allocates it."""
        return self.device_need_of_plan(question, job, solution.plan)

    def device_need_of_plan(self, question: PlanQuestion, job: PlannedJob, plan: Plan) -> DeviceNeed:
        """Returns the same as `device_need`, for a plan."""
        shape = (job.model.num_examples, job.model.num_tokens)
        lengths = question.lengths_in(job.num_microbatches)
        return device_need(
            self._shapes.profiler.rehearsed,
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
            rehearsed=self._shapes.rehearsed,
        )

    def job(self, question: PlanQuestion, num_microbatches: int) -> PlannedJob:
        """Builds the solver's view of the job, with the given number of micro-batches."""
        profile = self._of_job(question, num_microbatches)
        if question.num_layers is not None:
            profile = profile.with_num_layers(question.num_layers)
        if self._speedup != 1:
            profile = profile.sped_up(self._speedup)
        return planned_job(question, profile, num_microbatches)

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

    def _by_shapes(self, num_examples: int, num_tokens: int) -> ModelProfile:
        shape = (num_examples, num_tokens)
        profiles = self._shapes.profiles
        if shape not in profiles:
            profiles[shape] = self._shapes.profiler.profile(*shape)
        return profiles[shape]

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
