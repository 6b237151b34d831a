"""The measured step time and peak memory of a job, over all its attempts, to be compared with its plan.

No clock, no I/O.
"""

from typing import Any

from windlass.actors.job import NUM_FIRST_STEPS, StepTimes
from windlass.actors.messages import MemoryKind, MemoryReported, SpanKind
from windlass.actors.timeline.span_files import StepSpans
from windlass.storage.ids import ActorName

_EVALUATION = frozenset((SpanKind.EVALUATE, SpanKind.EVALUATE_HEAD))


class Measured:
    """Collects measurements. A step's metrics include `data`."""

    def __init__(self, first_step: int, earlier: dict[str, Any] | None) -> None:
        """`first_step` is the attempt's first. `earlier` is the last `data` of earlier attempts, if there is any."""
        earlier = earlier or {}
        self._first_steady = first_step + NUM_FIRST_STEPS
        self._num_steps: int = earlier.get("num_steps", 0)
        self._total_s: float = (earlier.get("step_s") or 0.0) * self._num_steps
        self._steps = StepTimes()  # of this attempt
        self._last: dict[str, Any] | None = earlier.get("recent")  # of the attempt before, until this one has its own
        self._earlier_nbytes: dict[str, int] = earlier.get("peak_bytes", {})
        self._nbytes: dict[MemoryKind, dict[ActorName, int]] = {}

    def note_memory(self, event: MemoryReported) -> None:
        """Records an actor's use of one kind of memory."""
        of_kind = self._nbytes.setdefault(event.kind, {})
        of_kind[event.actor] = max(event.nbytes, of_kind.get(event.actor, 0))

    def note_step(self, step: StepSpans) -> None:
        """Counts a step if it is in steady state and without an evaluation, because plans do not cover evaluations."""
        if step.step < self._first_steady:
            return
        if any(span.kind in _EVALUATION and span.start_s < step.end_s for span in step.spans):
            return
        self._num_steps += 1
        self._total_s += step.end_s - step.start_s
        self._steps.note(step.end_s - step.start_s)

    @property
    def data(self) -> dict[str, Any]:
        """The JSON object for a step's metrics.

        `step_s` is the mean of `num_steps` steady steps, None before the first. `recent` is about the last ones of an
        attempt. `peak_bytes` is by kind of memory: of all SSDs, of the GPU that uses most, and of the arena, whose use
        each GPU worker reports.
        """
        peaks = dict(self._earlier_nbytes)
        for kind, of_actors in self._nbytes.items():
            nbytes = (sum if kind is MemoryKind.SSD else max)(of_actors.values())
            peaks[kind] = max(nbytes, peaks.get(kind, 0))
        step_s = self._total_s / self._num_steps if self._num_steps else None
        return {"step_s": step_s, "num_steps": self._num_steps, "recent": self._recent, "peak_bytes": peaks}

    @property
    def _recent(self) -> dict[str, Any] | None:
        """The time of the last steps, and the interval of that of the next ones, which is null while unknown."""
        if (interval_s := self._steps.interval_s) is None and self._last is not None:
            return self._last
        if self._steps.recent_s is None:
            return None
        low_s, high_s = interval_s or (None, None)
        return {
            "step_s": self._steps.recent_s,
            "num_steps": self._steps.num_recent,
            "step_s_low": low_s,
            "step_s_high": high_s,
        }
