"""Slows down resources, so that one machine shows the effect of another machine's bottlenecks.

Bytes, updates and blocks are real, and their completion is delayed. A transfer is reported at the time at which its
bytes would have passed at the throttle's rate, one transfer after the other. An update is delayed by its parameters,
and an operation by its products.

The rate is declared, not measured. A throttled resource records amount / rate as its busy time, never the time of a
sleep. If the work itself is slower than the rate, it takes longer, and still records amount / rate.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from windlass.actors.messages import SpanKind
from windlass.actors.timeline import NO_BOX, SpanRecorder
from windlass.storage.io import BlockDevice, IoSettings, Transfer, TransferEngine, open_engine

THROTTLE_FILE = "throttle.json"  # in the job's folder

# FLOP per parameter and token for the products of a block's params. Backward computes the block again, the head does
# not. The products of attention are left out.
FORWARD_FLOP, BACKWARD_FLOP, HEAD_FLOP = 2, 6, 6

_TRANSFERS = frozenset(kind for kind in SpanKind if kind.startswith(("read_", "write_")))
_OPERATIONS = frozenset((SpanKind.FORWARD, SpanKind.HEAD, SpanKind.BACKWARD, SpanKind.EVALUATE, SpanKind.EVALUATE_HEAD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Maximum rates. None: not throttled."""

    ssd_bytes_per_s: float | None = None  # of each SSD, read and written together
    optimizer_params_per_s: float | None = None  # of each optimizer
    compute_flop_per_s: float | None = None  # of each GPU worker, as counted above
    # Shares of this rate that the GPU workers have, in the order in which they start in one process. Others have all.
    gpu_shares: Sequence[float] = ()

    def __post_init__(self) -> None:
        for name, rate in asdict(self).items():
            if any(each is not None and each <= 0 for each in (rate if name == "gpu_shares" else (rate,))):
                raise ValueError(f"{name} is {rate}; a rate is above 0")

    def write(self, job_dir: Path) -> None:
        """Writes the rates for the processes of a job, which read them in their setup."""
        (job_dir / THROTTLE_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, job_dir: Path) -> "Throttle":
        """Reads the rates that were written for a job."""
        rates = json.loads((job_dir / THROTTLE_FILE).read_text())
        return cls(**{**rates, "gpu_shares": tuple(rates["gpu_shares"])})

    def slow_actor(self, name: str) -> None:
        """Throttles the actor of this name, which this process will create, permanently."""
        for module, attribute, slow in self._replacements(name.partition("-")[0]):
            setattr(module, attribute, slow)

    @contextlib.contextmanager
    def holding_back(self) -> Iterator[None]:
        """Throttles all actors that this process creates within the context."""
        with contextlib.ExitStack() as stack:
            for kind in ("ssd", "optimizer", "gpu"):
                for replacement in self._replacements(kind):
                    stack.enter_context(patch.object(*replacement))
            yield

    def _replacements(self, kind: str) -> list[tuple[ModuleType, str, Any]]:
        """Returns the attributes to replace.

        Does not load modules of other actors: SSD servers need no torch, for example.
        """
        if kind == "ssd" and self.ssd_bytes_per_s is not None:
            from windlass.actors.ssd import server as ssd_server
            from windlass.storage.io_scheduler import scheduler as io_scheduler

            rate = self.ssd_bytes_per_s
            log = _log_of(_TRANSFERS, lambda nbytes: nbytes / rate)
            return [(io_scheduler, "open_engine", _slow_engines(rate)), (ssd_server, "SpanRecorder", log)]
        if kind == "optimizer" and self.optimizer_params_per_s is not None:
            from windlass.actors.optimizer import worker as cpu_optimizer

            updater = _slow_updater(self.optimizer_params_per_s)
            log = _log_of((SpanKind.UPDATE,), lambda _: _passed.duration_s)
            return [(cpu_optimizer, "ChunkUpdater", updater), (cpu_optimizer, "SpanRecorder", log)]
        if kind == "gpu" and self.compute_flop_per_s is not None:
            from windlass.actors.gpu_worker import worker as gpu_worker

            runner = _slow_runner(self.compute_flop_per_s, self.gpu_shares)
            log = _log_of(_OPERATIONS, lambda _: _passed.duration_s)
            return [(gpu_worker, "BlockRunner", runner), (gpu_worker, "SpanRecorder", log)]
        return []


class Gate:
    """Lets amounts of work pass at a rate, one after the other. Thread-safe."""

    def __init__(self, rate_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate_per_s = rate_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._overslept_s = 0.0

    def due_s(self, amount: float, *, came_at_s: float | None = None) -> float:
        """Returns the time at which an amount has passed. It arrives now, or at `came_at_s`."""
        with self._lock:
            # A thread that woke up late would arrive late the next time, so subtract the delay.
            came_at_s = (self._clock() if came_at_s is None else came_at_s) - self._overslept_s
            self._free_at_s = max(self._free_at_s, came_at_s) + amount / self._rate_per_s
            return self._free_at_s

    @contextlib.contextmanager
    def passing(self, amount: float, *, came_at_s: float | None = None) -> Iterator[None]:
        """Delays the end of the context until the amount has passed. The thread's next span has that duration."""
        due_s = self.due_s(amount, came_at_s=came_at_s)
        yield
        self._overslept_s = 0.0
        if self._clock() < due_s:
            sleep_until(due_s)
            self._overslept_s = self._clock() - due_s
        _passed.duration_s = amount / self._rate_per_s


class _Passed(threading.local):
    """The duration of a thread's last work at its declared rate."""

    duration_s = 0.0


_passed = _Passed()


def _log_of(kinds: Collection[SpanKind], busy_s: Callable[[int], float]) -> type[SpanRecorder]:
    """Returns a `SpanRecorder` that moves the start of such spans, so that they last as long as declared."""

    class DeclaredLog(SpanRecorder):
        def note(
            self,
            resource: str,
            kind: SpanKind,
            step: int,
            block: int,
            chunk: int,
            start_s: float,
            end_s: float,
            nbytes: int = 0,
            box: int = NO_BOX,
        ) -> None:
            if kind in kinds:
                start_s = end_s - busy_s(nbytes)
            super().note(resource, kind, step, block, chunk, start_s, end_s, nbytes, box)

    return DeclaredLog


class ThrottledEngine:
    """Wraps a transfer engine, and reports its transfers only when they have passed a gate."""

    def __init__(self, engine: TransferEngine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self._due_s: dict[Transfer, float] = {}
        self._moved: list[Transfer] = []  # moved, but not reported

    @property
    def depth(self) -> int:
        """The maximum number of transfers in flight."""
        return self._engine.depth

    @property
    def num_in_flight(self) -> int:
        """The number of transfers submitted and not reported."""
        return len(self._due_s)

    def submit(self, transfer: Transfer) -> None:
        """Begins a transfer. Raises ValueError if `depth` are in flight."""
        if self.num_in_flight == self.depth:
            raise ValueError(f"{self.depth} transfers are in flight")
        self._due_s[transfer] = self._gate.due_s(len(transfer.buffer))
        self._engine.submit(transfer)

    def wait(self, timeout_s: float | None) -> list[Transfer]:
        """Returns transfers that have passed the gate, at least one, or none after `timeout_s` seconds."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._moved:
            self._moved += self._engine.wait(timeout_s)
        if not self._moved:
            return []
        first = min(self._moved, key=lambda transfer: self._due_s[transfer])
        if until_s is not None and self._due_s[first] > until_s:
            sleep_until(until_s)
            return []
        sleep_until(self._due_s.pop(first))
        self._moved.remove(first)
        return [first]

    def close(self) -> None:
        """Waits until no transfer is in flight, and closes the engine."""
        self._engine.close()


def _slow_engines(rate_per_s: float) -> Any:
    """Returns a replacement of `open_engine`. Threads of a server that share a device also share its gate."""
    gates: dict[int, Gate] = {}

    def open_slowly(device: BlockDevice, settings: IoSettings) -> TransferEngine:
        gate = gates.setdefault(id(device), Gate(rate_per_s))
        return ThrottledEngine(open_engine(device, settings), gate)

    return open_slowly


def _slow_updater(rate_per_s: float) -> Any:
    """Returns a replacement of `ChunkUpdater` that updates `rate_per_s` parameters per second."""
    from windlass.actors.optimizer import ChunkUpdater

    class ThrottledUpdater(ChunkUpdater):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._gate = Gate(rate_per_s)

        def update(self, update: Any, start: int, grad: Any, states: Mapping[Any, Any]) -> None:
            with self._gate.passing(grad.numel()):
                super().update(update, start, grad, states)

    return ThrottledUpdater


def _slow_runner(rate_per_s: float, shares: Sequence[float]) -> Any:
    """Returns a replacement of `BlockRunner` that computes `rate_per_s` FLOP per second, or a share of them."""
    from windlass.engine.model import BlockRunner

    shares_to_come = iter(shares)

    class ThrottledRunner(BlockRunner):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._gate = Gate(rate_per_s * next(shares_to_come, 1.0))
            self._began_s = 0.0

        def install(self, *arguments: Any) -> None:
            self._began_s = time.monotonic()
            super().install(*arguments)

        def forward(self, block: Any, step: int, batch: Sequence[Any], **options: Any) -> None:
            with self._passing(FORWARD_FLOP, block, batch):
                super().forward(block, step, batch, **options)

        def backward(self, block: Any, step: int, batch: Sequence[Any]) -> None:
            with self._passing(BACKWARD_FLOP, block, batch):
                super().backward(block, step, batch)

        def head(self, step: int, targets: Sequence[Any], *, train: bool = True, **options: Any) -> Any:
            flop = HEAD_FLOP if train else FORWARD_FLOP
            with self._passing(flop, self.partition.head, targets):
                return super().head(step, targets, train=train, **options)

        def _passing(self, flop: int, block: int, batch: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
            numel = self.partition.layout.blocks[block].numel
            amount = flop * numel * sum(each.numel() for each in batch)
            return self._gate.passing(amount, came_at_s=self._began_s)

    return ThrottledRunner


def sleep_until(at_s: float) -> None:
    """Sleeps until a time of `time.monotonic`."""
    time.sleep(max(0.0, at_s - time.monotonic()))
