"""The core's requests to the scheduler's shell: to send a message, record a step's end, or decide a commit."""

from dataclasses import dataclass
from typing import Any

from windlass.actors.policy.pending_replies import Instruction
from windlass.storage.ids import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The facts about a step that are known once all its gradients are."""

    grad_norm: float  # of all gradients, before clipping; NaN if one is not finite and the step is skipped
    loss_scale: float  # of this step
    num_skipped: int  # skipped steps so far, this one included


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStep:
    """Asks the scheduler's shell to record the end of a step. It comes before the instructions to commit the step."""

    step: Step
    end: StepEnd | None  # None for step 0
    trainer: dict[str, Any]  # the trainer's state after the step, which its commit must store


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideCommit:
    """Asks the scheduler's shell to note durably that all SSDs have committed a step, then to call `commit_decided`."""

    step: Step


Action = Instruction | EndStep | DecideCommit
