"""Resources made slower than they are, so that one machine shows what happens where another one is the bottleneck.

Real bytes move and real updates are computed, and then held back: a transfer is reported when its bytes would have
passed at the throttle's rate, one transfer after the other, an update when its parameters would. What a throttled
resource has done is counted in bytes and parameters, never in time spent asleep.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.storage.transfers import BlockDevice, IoSettings, Transfer, TransferEngine, open_engine

THROTTLE_FILE = "throttle.json"  # in the job's folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Rates that nothing is faster than; None: as fast as it can."""

    ssd_bytes_per_s: float | None = None  # of each SSD, read and written together
    optimizer_params_per_s: float | None = None  # of each optimizer

    def __post_init__(self) -> None:
        for name, rate in asdict(self).items():
            if rate is not None and rate <= 0:
                raise ValueError(f"{name} is {rate}; a rate is above 0")

    def write(self, job_dir: Path) -> None:
        """For the processes of a job, which read it when they are set up."""
        (job_dir / THROTTLE_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, job_dir: Path) -> "Throttle":
        """What was written for a job."""
        return cls(**json.loads((job_dir / THROTTLE_FILE).read_text()))

    def slow_ssd_server(self) -> None:
        """Hold back the transfers of SSD servers that this process makes from now on."""
        if self.ssd_bytes_per_s is not None:
            from windlass.actors import ssd_server

            ssd_server.open_engine = _slow_engines(self.ssd_bytes_per_s)  # type: ignore[attr-defined]

    def slow_optimizer(self) -> None:
        """Hold back the updates of optimizers that this process makes from now on."""
        if self.optimizer_params_per_s is not None:
            from windlass.actors import cpu_optimizer  # which loads torch: an SSD server does without

            cpu_optimizer.ChunkUpdater = _slow_updater(self.optimizer_params_per_s)  # type: ignore[attr-defined]


class Gate:
    """What comes passes at a rate, one after the other. Safe from many threads."""

    def __init__(self, rate_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate_per_s = rate_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def due_s(self, amount: float) -> float:
        """When this has passed, if it comes now."""
        with self._lock:
            self._free_at_s = max(self._free_at_s, self._clock()) + amount / self._rate_per_s
            return self._free_at_s


class ThrottledEngine:
    """Transfers of another engine, reported no earlier than they passed a gate."""

    def __init__(self, engine: TransferEngine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self._due_s: dict[Transfer, float] = {}
        self._moved: list[Transfer] = []  # and not reported

    @property
    def depth(self) -> int:
        """Transfers that may be in flight."""
        return self._engine.depth

    @property
    def num_in_flight(self) -> int:
        """Transfers submitted and not reported."""
        return len(self._due_s)

    def submit(self, transfer: Transfer) -> None:
        """Begin a transfer. ValueError if `depth` are in flight."""
        if self.num_in_flight == self.depth:
            raise ValueError(f"{self.depth} transfers are in flight")
        self._due_s[transfer] = self._gate.due_s(len(transfer.buffer))
        self._engine.submit(transfer)

    def wait(self, timeout_s: float | None) -> list[Transfer]:
        """What has moved and passed the gate, at least one; none if that takes longer than `timeout_s` seconds."""
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
        """Wait until nothing is in flight, and let go."""
        self._engine.close()


def _slow_engines(rate_per_s: float) -> Any:
    """In place of `open_engine`: the threads of a server, which share a device, share its gate."""
    gates: dict[int, Gate] = {}

    def open_slowly(device: BlockDevice, settings: IoSettings) -> TransferEngine:
        gate = gates.setdefault(id(device), Gate(rate_per_s))
        return ThrottledEngine(open_engine(device, settings), gate)

    return open_slowly


def _slow_updater(rate_per_s: float) -> Any:
    """In place of `ChunkUpdater`: as many parameters a second."""
    from windlass.actors.chunk_update import ChunkUpdater

    class ThrottledUpdater(ChunkUpdater):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._gate = Gate(rate_per_s)

        def update(self, update: Any, start: int, grad: Any, states: Mapping[Any, Any]) -> None:
            due_s = self._gate.due_s(grad.numel())
            super().update(update, start, grad, states)
            sleep_until(due_s)

    return ThrottledUpdater


def sleep_until(at_s: float) -> None:
    """Sleep until a time of `time.monotonic`."""
    time.sleep(max(0.0, at_s - time.monotonic()))
