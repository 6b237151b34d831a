"""The times of a model's blocks that plans need: known ones, and what is to be measured for the others."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from windlass.planner.cost import ModelProfile
from windlass.planner.profiling import BlockTimes, MeasuredBlocks, measured_layers, measuring_s
from windlass.planner.question.question import PlanQuestion

# Seconds of a pass, by the machine's rates, above which a micro-batch is measured with fewer examples. So long a pass
# keeps all cores busy, so a larger one takes longer in proportion.
_LONG_ENOUGH_S = 2.0
# Random params, with room for gradients, that a measurement makes per second, by one thread: all of a block before
# each of its passes. 145 to 170 million on an AMD EPYC (2026-11-28, bf16).
_MADE_PER_S = 150e6

Times = dict[int, BlockTimes]


@dataclass(frozen=True, kw_only=True)
class TimesNeed:
    """The need of a plan for the times of all blocks, for micro-batches of one shape."""

    question: PlanQuestion
    profile: ModelProfile  # of the shape that is measured
    num_microbatches: int  # of a step
    pass_s: float  # about the seconds of a forward and a backward pass of what is measured, by the machine's rates

    @cached_property
    def facts(self) -> dict[str, Any]:
        """All that the times depend on, besides model and machine."""
        training = self.question.training
        return {
            "shape": (self.profile.num_examples, self.profile.num_tokens),
            "precision": training.precision,
            "sums_grads": self.num_microbatches > 1,
            "has_lanes": training.lanes > 1,
            "grad_precision": replace(training, num_microbatches=self.num_microbatches, lanes=1).grad_precision,
            "head_slices": training.head_slices,
            "device": "cuda" if self.question.has_gpu else "cpu",
        }

    @property
    def key(self) -> tuple[Any, ...]:
        """Needs with the same key have the same times."""
        return tuple(self.facts.values())

    @property
    def can_be_measured(self) -> bool:
        """False if this process has no such device, or if a block takes more than the job may have on its device."""
        return self._has_device and not self._is_too_large

    @property
    def _is_too_large(self) -> bool:
        training = self.question.training
        numel = max(block.numel for block in self.profile.blocks)
        nbytes = numel * (training.formats.precision.itemsize + training.grad_precision.itemsize)
        return nbytes > self.question.limits.device_nbytes

    @property
    def _has_device(self) -> bool:
        if not self.question.has_gpu:
            return True
        import torch

        return torch.cuda.is_available()

    @property
    def measuring_s(self) -> float:
        """About the seconds that the measurement takes, by the machine's rates, with the making of random params."""
        made = 2 * sum(layer.numel * number for layer, number in measured_layers(self.profile))
        made += 2 * self.profile.embedding.numel + self.profile.head.numel
        return measuring_s(self.pass_s + made / _MADE_PER_S)

    def measure(self) -> MeasuredBlocks:
        """Measures block times as a job's GPU worker would compute them."""
        import torch

        from windlass.engine.device import retain_freed_memory
        from windlass.planner.profiling import loaded, measure_blocks

        question, facts = self.question, self.facts
        if question.measure_threads is not None:
            torch.set_num_threads(question.measure_threads)
            if not question.has_gpu:
                retain_freed_memory()
        return measure_blocks(
            self.profile,
            loaded(question.config),
            facts["precision"],
            torch.device("cuda", 0) if question.has_gpu else torch.device("cpu"),
            sums_grads=facts["sums_grads"],
            has_lanes=facts["has_lanes"],
            grad_precision=facts["grad_precision"],
            head_slices=facts["head_slices"],
        )


@dataclass(slots=True)
class TimesOfBlocks:
    """The block times of one model: stored ones, and those that were measured here.

    Stored ones that were used once hold for all parts of an answer, even if they are to be measured again.
    """

    _used: dict[tuple[Any, ...], Times] = field(default_factory=dict)  # by the key of a need
    _too_large: set[tuple[Any, ...]] = field(default_factory=set)  # keys of needs whose measurement failed

    def known(self, need: TimesNeed) -> Times | None:
        """Returns the times if they are known."""
        kept = need.question.kept_times
        if need.key not in self._used and kept is not None:
            stored = kept.known(need.question.config, need.facts)
            if stored is not None:
                self._used[need.key] = stored
        return self._used.get(need.key)

    def measured(self, need: TimesNeed) -> Times | None:
        """Measures the times and stores them. Returns None if they are too large to be measured here."""
        question = need.question
        if need.key in self._too_large:
            return None
        try:
            if question.kept_times is None:
                times = need.measure().times
            else:
                times = question.kept_times.of(question.config, need.facts, need.measure)
        except (RuntimeError, MemoryError):
            self._too_large.add(need.key)
            return None
        self._used[need.key] = times
        return times


def num_measured(num_examples: int, pass_s: float) -> int:
    """Returns how many of a micro-batch's examples are measured: their pass takes about `_LONG_ENOUGH_S` at most.

    `pass_s`: that of all.
    """
    return max(1, min(num_examples, int(num_examples * _LONG_ENOUGH_S / pass_s)))


def different_needs(needs: Iterable[TimesNeed]) -> list[TimesNeed]:
    """Returns one need of those with the same times."""
    return list({need.key: need for need in needs}.values())
