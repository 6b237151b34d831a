"""What a job has really taken, over all its attempts, beside which people see what was planned. No clock, no I/O."""

from typing import Any

from windlass.actors.job import NUM_FIRST_STEPS
from windlass.actors.messages import MemoryKind, MemoryReported, SpanKind
from windlass.actors.timeline.span_files import StepSpans
from windlass.storage.ids import ActorName

_EVALUATION = frozenset((SpanKind.EVALUATE, SpanKind.EVALUATE_HEAD))


class Measured:
    """Takes in what was measured; `data` is what a step's metrics tell of it."""

    def __init__(self, first_step: int, earlier: dict[str, Any] | None) -> None:
        """`first_step`: of the attempt. `earlier`: the last `data` that earlier attempts have told; None: nothing."""
        earlier = earlier or {}
        self._first_steady = first_step + NUM_FIRST_STEPS
        self._num_steps: int = earlier.get("num_steps", 0)
        self._total_s: float = (earlier.get("step_s") or 0.0) * self._num_steps
        self._earlier_nbytes: dict[str, int] = earlier.get("peak_bytes", {})
        self._nbytes: dict[MemoryKind, dict[ActorName, int]] = {}

    def note_memory(self, event: MemoryReported) -> None:
        """An actor's part of a kind of memory."""
        of_kind = self._nbytes.setdefault(event.kind, {})
        of_kind[event.actor] = max(event.nbytes, of_kind.get(event.actor, 0))

    def note_step(self, step: StepSpans) -> None:
        """Counts if it is steady, and holds no evaluation: of those no plan knows."""
        if step.step < self._first_steady:
            return
        if any(span.kind in _EVALUATION and span.start_s < step.end_s for span in step.spans):
            return
        self._num_steps += 1
        self._total_s += step.end_s - step.start_s

    @property
    def data(self) -> dict[str, Any]:
        """`step_s`: mean of `num_steps` steady steps, None before the first. `peak_bytes` of each kind of memory."""
        peaks = dict(self._earlier_nbytes)
        for kind, of_actors in self._nbytes.items():
            peaks[kind] = max(sum(of_actors.values()), peaks.get(kind, 0))
        step_s = self._total_s / self._num_steps if self._num_steps else None
        return {"step_s": step_s, "num_steps": self._num_steps, "peak_bytes": peaks}
