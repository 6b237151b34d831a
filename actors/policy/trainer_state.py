"""What training carries from step to step besides the model's states: a commit keeps it, a restart takes it up."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# As torch.amp.GradScaler has them by default.
_INITIAL_SCALE = 65536.0
_GROWTH_INTERVAL = 2000
_GROWTH = 2.0
_BACKOFF = 0.5
# The normal numbers of fp32, in which the loss is scaled.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**127


class StepResult(StrEnum):
    """What a step's gradients led to."""

    UPDATED = "updated"
    SKIPPED = "skipped"  # they were not finite: the states stay as they were


@dataclass(slots=True)
class TrainerState:
    """Counts, and the dynamic loss scale of fp16 training.

    Source of the scale's rules: torch.amp.GradScaler. Halved at an overflow, doubled after so many steps without one.
    """

    scales_loss: bool
    num_updates: int = 0  # steps that were not skipped: Adam's t
    num_bad_steps: int = 0  # skipped, in a row
    loss_scale: float = _INITIAL_SCALE  # of the next step
    num_good_steps: int = 0  # since the scale changed

    @property
    def next_loss_scale(self) -> float:
        """What the next step's loss is multiplied by."""
        return self.loss_scale if self.scales_loss else 1.0

    def to_json(self) -> dict[str, float]:
        """What a commit keeps."""
        return {
            "optimizer_step": self.num_updates,
            "bad_steps": self.num_bad_steps,
            "loss_scale": self.loss_scale,
            "good_steps": self.num_good_steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up what a commit kept."""
        self.num_updates, self.num_bad_steps = state["optimizer_step"], state["bad_steps"]
        self.loss_scale, self.num_good_steps = state["loss_scale"], state["good_steps"]

    def end_step(self, result: StepResult) -> None:
        """All gradients of a step are known."""
        if result is StepResult.SKIPPED:
            self.num_bad_steps += 1
            self.num_good_steps = 0
            self.loss_scale = max(self.loss_scale * _BACKOFF, _SMALLEST_SCALE)
            return
        self.num_updates += 1
        self.num_bad_steps = 0
        self.num_good_steps += 1
        if self.num_good_steps == _GROWTH_INTERVAL:
            self.num_good_steps = 0
            self.loss_scale = min(self.loss_scale * _GROWTH, _LARGEST_SCALE)
