"""Records the time spans of activation copies, and of compute's waits for activations."""

import threading
from dataclasses import dataclass

from windlass.actors.messages import SpanKind
from windlass.actors.timeline import COMPUTE, FROM_DEVICE, TO_DEVICE, WHOLE_BLOCK, SpanRecorder
from windlass.storage.ids import BlockIndex, Step

# Seconds. Copies of one block with shorter gaps become one span, because a micro-batch may have dozens of copies.
_GAP_S = 1e-4


@dataclass(slots=True)
class _Run:
    """Copies with short gaps, recorded as one span."""

    owner: tuple[Step, BlockIndex]
    start_s: float
    end_s: float
    nbytes: int


class ActivationSpans:
    """A SwapWatch that records spans. Copies belong to the operation that offloaded the bytes."""

    def __init__(self, spans: SpanRecorder) -> None:
        self._spans = spans
        self._now = Step(0), BlockIndex(0)
        self._runs: dict[bool, _Run] = {}  # by direction; True: from the device
        self._lock = threading.Lock()

    def begin(self, step: Step, block: BlockIndex) -> None:
        """Sets the operation that the compute thread begins."""
        self._now = step, block

    def owner(self) -> tuple[Step, BlockIndex]:
        """See SwapWatch."""
        return self._now

    def moved(self, owner: object, start_s: float, end_s: float, nbytes: int, *, is_out: bool) -> None:
        """See SwapWatch."""
        assert isinstance(owner, tuple)
        with self._lock:
            run = self._runs.get(is_out)
            if run is not None and run.owner == owner and start_s - run.end_s <= _GAP_S:
                run.end_s = end_s
                run.nbytes += nbytes
                return
            if run is not None:
                self._note(run, is_out=is_out)
            self._runs[is_out] = _Run(owner, start_s, end_s, nbytes)

    def waited(self, owner: object, start_s: float, end_s: float) -> None:
        """See SwapWatch."""
        assert isinstance(owner, tuple)
        step, block = owner
        self._spans.note(COMPUTE, SpanKind.WAIT_ACTIVATIONS, step, block, WHOLE_BLOCK, start_s, end_s)

    def flush(self) -> None:
        """Records the open spans, at the end of a step's activations."""
        with self._lock:
            for is_out, run in self._runs.items():
                self._note(run, is_out=is_out)
            self._runs.clear()

    def _note(self, run: _Run, *, is_out: bool) -> None:
        resource, kind = (
            (FROM_DEVICE, SpanKind.COPY_ACTIVATIONS_OUT) if is_out else (TO_DEVICE, SpanKind.COPY_ACTIVATIONS_IN)
        )
        self._spans.note(resource, kind, *run.owner, WHOLE_BLOCK, run.start_s, run.end_s, run.nbytes)
