"""Which steps of a job become checkpoints, which of these stay, and whether the job ends before its last step.

By what evaluations find and by how much time has passed, as it is told: no clock, no I/O. A commit keeps all of it, so
that a restart, which evaluates the committed step again, decides the same again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from windlass.actors.job import FinalModel, JobSpec


class Reason(StrEnum):
    """Why a model was exported; one that has no reason any more is removed."""

    INTERVAL = "interval"  # every so many steps
    MINUTES = "minutes"  # so much time had passed
    BEST = "best"  # the lowest validation loss so far
    LAST = "last"  # the job's model


_LIMITED = frozenset((Reason.INTERVAL, Reason.MINUTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an evaluation means."""

    is_best: bool  # to be kept as a checkpoint
    ends_job: bool


class Checkpoints:
    """What there is, what is the best, and what is due. Times are seconds of one monotonic clock."""

    def __init__(self, spec: JobSpec, resumed: Mapping[str, Any] | None = None) -> None:
        """`resumed`: what a commit kept."""
        self._spec = spec
        state = resumed or {}
        best = state.get("best")
        self.best: tuple[int, float] | None = None if best is None else (best[0], best[1])  # step, loss
        self._reference: float | None = state.get("reference")  # the loss that was the last improvement
        self.num_without_improvement: int = state.get("without_improvement", 0)  # evaluations in a row
        self._kept = {step: {Reason(each) for each in reasons} for step, reasons in state.get("kept", ())}
        self._timed: int | None = state.get("timed")  # the step that is to be exported as the time has come
        self._elapsed_s: float = state.get("elapsed_s", 0.0)  # since the last one but for the best, up to `_since_s`
        self._since_s: float | None = None  # None: training has not begun

    def to_json(self, now_s: float) -> dict[str, Any]:
        """What a commit keeps."""
        return {
            "best": self.best,
            "reference": self._reference,
            "without_improvement": self.num_without_improvement,
            "kept": self.kept,
            "timed": self._timed,
            "elapsed_s": 0.0 if self._spec.checkpoint_minutes is None else self._since_last_s(now_s),
        }

    @property
    def kept(self) -> list[tuple[int, list[str]]]:
        """The checkpoints that there are: steps, and why."""
        return [(step, sorted(reasons)) for step, reasons in sorted(self._kept.items())]

    # --- time ---------------------------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        """Training begins, or goes on: time counts from now on."""
        self._since_s = now_s

    def is_time(self, now_s: float) -> bool:
        """Whether a checkpoint is due and none has been asked for."""
        minutes = self._spec.checkpoint_minutes
        return minutes is not None and self._timed is None and self._since_last_s(now_s) >= 60.0 * minutes

    def time_has_come(self, step: int) -> None:
        """This step will be exported, as it is time."""
        self._timed = step

    def resume_timed(self, step: int) -> bool:
        """Whether the step that an attempt goes on from is to be exported as it was time.

        Where it was to be a later one, it is time again.
        """
        if self._timed != step:
            self._timed = None
        return self._timed is not None

    def _since_last_s(self, now_s: float) -> float:
        return self._elapsed_s + (0.0 if self._since_s is None else now_s - self._since_s)

    # --- evaluations --------------------------------------------------------------------------------------------------

    def evaluated(self, step: int, loss: float | None) -> Verdict:
        """`loss` None: it is not finite, which is no improvement."""
        is_best = loss is not None and (self.best is None or loss < self.best[1])
        if is_best and loss is not None:
            self.best = (step, loss)
        stopping = self._spec.early_stopping
        min_delta = 0.0 if stopping is None else stopping.min_delta
        if loss is not None and (self._reference is None or loss < self._reference - min_delta):
            self._reference, self.num_without_improvement = loss, 0
        else:
            self.num_without_improvement += 1
        ends = stopping is not None and self.num_without_improvement >= stopping.patience
        return Verdict(
            is_best=is_best and self._spec.keeps_best,
            ends_job=ends and step < self._spec.total_steps,
        )

    def model_instead_of(self, step: int) -> int | None:
        """The step whose model is the job's, where it is not that of the last step."""
        if self._spec.final_model is FinalModel.LAST or self.best is None or self.best[0] == step:
            return None
        return self.best[0]

    # --- exports ------------------------------------------------------------------------------------------------------

    def exported(self, step: int, now_s: float, *, is_last: bool) -> list[int]:
        """A step is exported. Returns the steps whose exports are to be removed."""
        reasons = {Reason.LAST} if is_last else self._reasons(step)
        if reasons & _LIMITED:
            self._elapsed_s, self._since_s = 0.0, now_s
        if self._timed == step:
            self._timed = None
        if self._spec.keeps_best and self.best is not None and self.best[0] == step:
            for others in self._kept.values():
                others.discard(Reason.BEST)
            reasons.add(Reason.BEST)
        self._kept[step] = reasons
        self._limit()
        removed = [each for each, why in self._kept.items() if not why]
        for each in removed:
            del self._kept[each]
        return removed

    def reasons(self, step: int) -> list[str]:
        """Why there is an export of a step."""
        return sorted(self._kept[step])

    def _reasons(self, step: int) -> set[Reason]:
        found = set()
        if self._spec.checkpoint_every and step % self._spec.checkpoint_every == 0:
            found.add(Reason.INTERVAL)
        if step == self._timed:
            found.add(Reason.MINUTES)
        return found

    def _limit(self) -> None:
        limited = sorted(step for step, reasons in self._kept.items() if reasons & _LIMITED)
        if (limit := self._spec.keep_checkpoints) is not None:
            for step in limited[:-limit]:
                self._kept[step] -= _LIMITED
