"""Notes what activations cost in time: their copies, and what compute waited for them."""

import threading
from dataclasses import dataclass

from windlass.actors.messages import SpanKind
from windlass.actors.timeline import COMPUTE, FROM_DEVICE, TO_DEVICE, WHOLE_BLOCK, SpanRecorder
from windlass.storage.ids import BlockIndex, Step

# Copies of one block that follow each other so soon are one span: there may be dozens for each micro-batch.
_GAP_S = 1e-4


@dataclass(slots=True)
class _Run:
    """Copies that follow each other."""

    owner: tuple[Step, BlockIndex]
    start_s: float
    end_s: float
    nbytes: int


class ActivationSpans:
    """A SwapWatch. Bytes are those of the operation that put them."""

    def __init__(self, spans: SpanRecorder) -> None:
        self._spans = spans
        self._now = Step(0), BlockIndex(0)
        self._runs: dict[bool, _Run] = {}  # by whether they go out
        self._lock = threading.Lock()

    def begin(self, step: Step, block: BlockIndex) -> None:
        """The thread that computes begins with an operation."""
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
        """Nothing of the step's activations is to come: what has moved may be told."""
        with self._lock:
            for is_out, run in self._runs.items():
                self._note(run, is_out=is_out)
            self._runs.clear()

    def _note(self, run: _Run, *, is_out: bool) -> None:
        resource, kind = (
            (FROM_DEVICE, SpanKind.COPY_ACTIVATIONS_OUT) if is_out else (TO_DEVICE, SpanKind.COPY_ACTIVATIONS_IN)
        )
        self._spans.note(resource, kind, *run.owner, WHOLE_BLOCK, run.start_s, run.end_s, run.nbytes)
