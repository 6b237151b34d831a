"""Decides which steps become checkpoints, which checkpoints are kept, and whether the job ends early.

The decisions depend on evaluation results and on times that the caller passes. No clock, no I/O. A commit stores this
state, so that a restart, which evaluates the committed step again, makes the same decisions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from windlass.actors.job import JobSpec
from windlass.engine.training_config import FinalModel


class Reason(StrEnum):
    """The reasons for which a checkpoint is kept. A checkpoint without a reason is removed."""

    INTERVAL = "interval"  # due by the number of steps
    MINUTES = "minutes"  # due by time
    BEST = "best"  # the lowest validation loss so far
    LAST = "last"  # the job's model


# The reasons that the setting keep_checkpoints limits.
_LIMITED = frozenset((Reason.INTERVAL, Reason.MINUTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The consequences of an evaluation."""

    is_best: bool  # the step is to be kept as a checkpoint
    ends_job: bool


class Checkpoints:
    """The checkpoints of a job: the kept ones, the best one, and the next one due by time.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, spec: JobSpec, resumed: Mapping[str, Any] | None = None) -> None:
        """`resumed` is the state of a commit, as `to_json` returned it."""
        self._training, self._keeps_best = spec.training, spec.keeps_best
        state = resumed or {}
        best = state.get("best")
        self.best: tuple[int, float] | None = None if best is None else (best[0], best[1])  # step, loss
        self._reference: float | None = state.get("reference")  # the loss at the last improvement
        self.num_without_improvement: int = state.get("without_improvement", 0)  # evaluations in a row
        self._kept = {step: {Reason(name) for name in names} for step, names in state.get("kept", ())}
        self._timed: int | None = state.get("timed")  # the step that was chosen for export by time
        # Training time from the last checkpoint by steps or time up to `_since_s`.
        self._elapsed_s: float = state.get("elapsed_s", 0.0)
        self._since_s: float | None = None  # None: training has not begun

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Returns the JSON object that a commit stores."""
        return {
            "best": self.best,
            "reference": self._reference,
            "without_improvement": self.num_without_improvement,
            "kept": self.kept,
            "timed": self._timed,
            "elapsed_s": 0.0 if self._training.checkpoint_minutes is None else self._since_last_s(now_s),
        }

    @property
    def kept(self) -> list[tuple[int, list[str]]]:
        """The steps of the kept checkpoints, with their reasons."""
        return [(step, sorted(reasons)) for step, reasons in sorted(self._kept.items())]

    # --- time ---------------------------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        """Starts the time count when training begins or resumes."""
        self._since_s = now_s

    def is_time(self, now_s: float) -> bool:
        """Returns whether a checkpoint is due by time and no step was chosen for it yet."""
        minutes = self._training.checkpoint_minutes
        return minutes is not None and self._timed is None and self._since_last_s(now_s) >= 60.0 * minutes

    def time_has_come(self, step: int) -> None:
        """Records the step that was chosen for export by time."""
        self._timed = step

    def resume_timed(self, step: int) -> bool:
        """Returns whether the step from which an attempt resumes was chosen for export by time.

        If a later step was chosen, the choice is dropped, and `is_time` is true again.
        """
        if self._timed != step:
            self._timed = None
        return self._timed is not None

    def _since_last_s(self, now_s: float) -> float:
        return self._elapsed_s + (0.0 if self._since_s is None else now_s - self._since_s)

    # --- evaluations --------------------------------------------------------------------------------------------------

    def evaluated(self, step: int, loss: float | None) -> Verdict:
        """Records an evaluation and returns its consequences. `loss` is None if it was not finite: no improvement."""
        is_best = loss is not None and (self.best is None or loss < self.best[1])
        if is_best and loss is not None:
            self.best = (step, loss)
        stopping = self._training.early_stopping
        min_delta = 0.0 if stopping is None else stopping.min_delta
        if loss is not None and (self._reference is None or loss < self._reference - min_delta):
            self._reference, self.num_without_improvement = loss, 0
        else:
            self.num_without_improvement += 1
        ends = stopping is not None and self.num_without_improvement >= stopping.patience
        return Verdict(
            is_best=is_best and self._keeps_best,
            ends_job=ends and step < self._training.total_steps,
        )

    def model_instead_of(self, step: int) -> int | None:
        """Returns the step whose model becomes the job's instead of that of the last step; None if there is none."""
        if self._training.final_model is FinalModel.LAST or self.best is None or self.best[0] == step:
            return None
        return self.best[0]

    # --- exports ------------------------------------------------------------------------------------------------------

    def exported(self, step: int, now_s: float, *, is_last: bool) -> list[int]:
        """Records the export of a step. Returns the steps whose exports must be removed."""
        reasons = {Reason.LAST} if is_last else self._reasons(step)
        if reasons & _LIMITED:
            self._elapsed_s, self._since_s = 0.0, now_s
        if self._timed == step:
            self._timed = None
        if self._keeps_best and self.best is not None and self.best[0] == step:
            for others in self._kept.values():
                others.discard(Reason.BEST)
            reasons.add(Reason.BEST)
        self._kept[step] = reasons
        self._limit()
        removed = [kept_step for kept_step, why in self._kept.items() if not why]
        for kept_step in removed:
            del self._kept[kept_step]
        return removed

    def reasons(self, step: int) -> list[str]:
        """Returns the reasons for which a step's checkpoint is kept."""
        return sorted(self._kept[step])

    def _reasons(self, step: int) -> set[Reason]:
        reasons = set()
        if self._training.checkpoint_every and step % self._training.checkpoint_every == 0:
            reasons.add(Reason.INTERVAL)
        if step == self._timed:
            reasons.add(Reason.MINUTES)
        return reasons

    def _limit(self) -> None:
        limited = sorted(step for step, reasons in self._kept.items() if reasons & _LIMITED)
        if (limit := self._training.keep_checkpoints) is not None:
            for step in limited[:-limit]:
                self._kept[step] -= _LIMITED
