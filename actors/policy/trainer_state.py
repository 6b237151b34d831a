"""The trainer's state: the numbers besides the model's states that a commit stores and a restart restores."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# The defaults of torch.amp.GradScaler.
_INITIAL_SCALE = 65536.0
_GROWTH_INTERVAL = 2000
_GROWTH = 2.0
_BACKOFF = 0.5
# The range of normal fp32 numbers, because the loss is scaled in fp32.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**127


class StepResult(StrEnum):
    """The results of a step."""

    UPDATED = "updated"
    SKIPPED = "skipped"  # its gradients were not finite; the states are unchanged


@dataclass(slots=True)
class TrainerState:
    """Step counts, and the dynamic loss scale of fp16 training.

    The scale is halved after an overflow and doubled after _GROWTH_INTERVAL steps without one.
    Source: torch.amp.GradScaler.
    """

    scales_loss: bool
    num_updates: int = 0  # steps that were not skipped: Adam's t
    num_bad_steps: int = 0  # skipped steps in a row, up to the last step
    loss_scale: float = _INITIAL_SCALE  # of the next step
    num_good_steps: int = 0  # steps without an overflow since the scale changed

    @property
    def next_loss_scale(self) -> float:
        """The factor on the next step's loss."""
        return self.loss_scale if self.scales_loss else 1.0

    def to_json(self) -> dict[str, float]:
        """Returns the JSON object that a commit stores."""
        return {
            "optimizer_step": self.num_updates,
            "bad_steps": self.num_bad_steps,
            "loss_scale": self.loss_scale,
            "good_steps": self.num_good_steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a commit's JSON object."""
        self.num_updates, self.num_bad_steps = state["optimizer_step"], state["bad_steps"]
        self.loss_scale, self.num_good_steps = state["loss_scale"], state["good_steps"]

    def end_step(self, result: StepResult) -> None:
        """Updates the counts and the loss scale with the result of a step."""
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
