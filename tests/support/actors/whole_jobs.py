"""Whole jobs of a small model with several micro-batches, and the results that are compared."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.training import exported_params, losses_of, make_spec, metrics_of
from windlass.actors.job.spec import JobSpec

NUM_MICROBATCHES = 4
# The fifth is the last of an epoch: it has two micro-batches of four.
NUM_STEPS = 6


def job(root: Path, **changes: Any) -> JobSpec:
    """A job with two lanes."""
    options = {"num_microbatches": NUM_MICROBATCHES, "total_steps": NUM_STEPS, "evaluate_every": 3, "lanes": 2}
    return make_spec(root, **(options | changes))


@dataclass
class Run:
    """The results of a job."""

    losses: list[float]
    validation_losses: dict[int, float]
    norms: dict[int, float]
    params: dict[str, torch.Tensor]

    @classmethod
    def of(cls, spec: JobSpec) -> "Run":
        """The results of an ended job."""
        return cls(
            losses_of(spec),
            metrics_of(spec, "valid_loss"),
            metrics_of(spec, "grad_norm"),
            exported_params(spec),
        )

    def assert_equals(self, other: "Run") -> None:
        assert self.losses == other.losses
        assert self.validation_losses == other.validation_losses
        assert self.norms == other.norms
        assert [name for name, param in self.params.items() if not torch.equal(param, other.params[name])] == []


def grouped(spec: JobSpec, group_size: int | None) -> JobSpec:
    """The job with groups of this many micro-batches."""
    return dataclasses.replace(spec, placement=dataclasses.replace(spec.placement, group_size=group_size))
