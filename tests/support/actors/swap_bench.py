"""A test bench for activations on SSDs: a job's memory, real or simulated SSD servers, and an activation store."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.activations import ssd_store as ssd_activations
from windlass.actors.activations import tiered_store as activation_tiers
from windlass.actors.activations.tiered_store import ActivationTiers
from windlass.actors.job.context import SCHEDULER, JobContext, SsdFacts, make_context, ssd_name
from windlass.actors.messages import (
    ActivationIoDone,
    ActorFailed,
    Message,
    ReadActivations,
    SpansReported,
    WorkSpan,
    WriteActivations,
)
from windlass.actors.ssd.client import SsdClient
from windlass.actors.ssd.server import SsdServer
from windlass.actors.timeline.recorder import SpanRecorder
from windlass.engine.device.device import Device
from windlass.engine.device.tensor_arena import TensorArena
from windlass.engine.memory_plan.plan import Pool
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ActorName, JobId, Span
from windlass.storage.io.engines import Backend, IoSettings
from windlass.storage.memory.arena import Arena, SlotPool
from windlass.storage.ssd.device import SsdDevice
from windlass.storage.store import JobSpace
from windlass.storage.threads import CancellableThreads

WORKER = ActorName("gpu-0")
SLOT_NBYTES = 4096
WAIT_S = 30.0
IO = IoSettings(backend=Backend.THREADS, num_threads=2, depth=1, piece_nbytes=1 << 20)


def make_swap_context(
    root: Path,
    *,
    num_host: int = 2,
    num_staged: int = 4,
    num_ssd: int = 32,
    weights: Sequence[int] = (1,),
    job: str = "ftjob-1",
    deadline_s: float = WAIT_S,
) -> JobContext:
    """A job context with activation slots of 4 KiB. The arena holds nothing else; the states on the SSDs are small."""
    ssds = tuple(SsdFacts(io=IO, weight=weight) for weight in weights)
    dirs = [root / f"ssd{i}" for i in range(len(weights))]
    spec = make_spec(job=JobId(job), ssd_dirs=tuple(map(str, dirs)), deadline_s=deadline_s)
    context = make_context(spec, make_layout(2048, 2048, 2048), str(root / f"{job}.arena"), ssds)
    pool = Pool(offset=0, slot_nbytes=SLOT_NBYTES, num_slots=num_host + num_staged)
    plan = replace(context.plan, activations=pool, num_staged_activations=num_staged, num_ssd_activations=num_ssd)
    return replace(context, plan=plan)


class PoisonedSlots(SlotPool):
    """A slot pool that fills released slots with 0xFF."""

    memory: torch.Tensor  # of the bench that made the pool

    def release(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self.memory[span.offset : span.offset + span.nbytes] = 0xFF
        super().release(spans)


class SwapBench:
    """An activation store whose requests go to SSD servers in this process, on real files. No other actor runs."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, context: JobContext, *, device: Device | None = None, direct: bool = True
    ) -> None:
        self.context = context
        self.failures: list[str] = []
        self.spans: list[WorkSpan] = []
        self.pools: list[PoisonedSlots] = []
        self.changed = threading.Condition()
        Path(context.arena_path).parent.mkdir(parents=True, exist_ok=True)
        num_slots = context.plan.activations.num_slots
        self.arena = Arena.create(context.arena_path, max(1, num_slots) * SLOT_NBYTES, huge_pages=False)
        self.memory = torch.frombuffer(self.arena.buffer(Span(0, self.arena.nbytes)), dtype=torch.uint8)
        self.memory.fill_(0xFF)
        self.device = device or Device(torch.device("cpu"), token=CancelToken(context.spec.deadline_s))
        self.threads = CancellableThreads(
            WORKER, context.spec.job, self.device.token, lambda error, _: self._failed(error), deadline_s=WAIT_S
        )
        self.servers: dict[ActorName, SsdServer] = {}
        with monkeypatch.context() as patch:
            patch.setattr(SsdDevice, "sync", lambda self: None)  # no power loss is tested here
            self.start_servers(direct)
            for module in (activation_tiers, ssd_activations):
                patch.setattr(module, "SlotPool", self._make_pool)
            self.span_log = SpanRecorder(WORKER, context.spec.job, self.send)
            self.client = SsdClient(WORKER, context, self.send)
            self.store = ActivationTiers(context, 0, self.device, TensorArena(self.memory), self.client, self.span_log)

    def _make_pool(self, *args: Any, **kwargs: Any) -> SlotPool:
        pool = PoisonedSlots(*args, **kwargs)
        pool.memory = self.memory
        self.pools.append(pool)
        return pool

    def start_servers(self, direct: bool) -> None:
        for i, directory in enumerate(self.context.spec.ssd_dirs):
            Path(directory).mkdir(exist_ok=True)
            space = JobSpace.open(
                directory,
                self.context.geometry(i),
                direct=direct,
                scratch_slot_nbytes=SLOT_NBYTES,
                num_scratch_slots=self.context.num_scratch_slots(i),
            )
            server = SsdServer(ssd_name(i), space, None, self.context.arena_path, self.send, io=IO)
            self.servers[ssd_name(i)] = server

    def send(self, to: ActorName, message: Message) -> None:
        match message:
            case WriteActivations() | ReadActivations():
                assert to in self.servers
                self.servers[to].post(message)
            case ActivationIoDone():
                assert to == WORKER
                self.client.take(message)
            case SpansReported():
                self.spans += message.spans
            case ActorFailed():
                assert to == SCHEDULER
                with self.changed:
                    self.failures.append(message.error)
                    self.changed.notify_all()
            case _:
                raise AssertionError(message)

    def _failed(self, error: Exception) -> None:
        with self.changed:
            self.failures.append(str(error))
            self.changed.notify_all()

    def failure(self) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.failures), WAIT_S)
            return self.failures.pop(0)

    @property
    def in_use_nbytes(self) -> int:
        return sum(pool.statistics.in_use_nbytes for pool in self.pools)

    def wait_until_free(self) -> None:
        """Waits until all slots of the memory are free."""
        until_s = time.monotonic() + WAIT_S
        while self.in_use_nbytes and time.monotonic() < until_s:
            time.sleep(0.001)
        assert self.in_use_nbytes == 0
        assert bool((self.memory == 0xFF).all())  # filled when they were released

    def close(self) -> None:
        """Closes the store as the worker does, then stops the servers."""
        self.threads.stop()
        self.store.close()
        for server in self.servers.values():
            server.stop(delete_store=True)
        self.span_log.tell(0)


def some_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))
