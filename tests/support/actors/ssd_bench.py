"""A test bench of the SSD server: a server of a small job, the requests to it and the messages that it sends."""

import contextlib
import errno
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.storage.stores import BF16
from windlass.actors.messages import (
    ActivationIoDone,
    ActorFailed,
    ChunkIo,
    ChunkIoDone,
    ChunkPart,
    CommitStore,
    MemoryReported,
    Message,
    ReadActivations,
    ReadChunks,
    SpansReported,
    WorkSpan,
    WriteActivations,
    WriteChunks,
)
from windlass.actors.ssd.server import SsdServer
from windlass.storage.ids import (
    ActorName,
    Attempt,
    BlockIndex,
    ChunkIndex,
    ChunkKey,
    CorrelationId,
    JobId,
    Rank,
    Span,
    SsdIndex,
    StateKind,
    Step,
)
from windlass.storage.io.engines import Backend, IoSettings
from windlass.storage.memory.arena import Arena
from windlass.storage.store.common_commit import last_common_commit
from windlass.storage.store.format import StoreGeometry

JOB = JobId("ftjob-1")
WORKER = ActorName("optimizer-0")
CHUNK_NUMEL = 1 << 19
CHUNK_NBYTES = 14 * CHUNK_NUMEL
GRADIENT_NBYTES = 2 * CHUNK_NUMEL
GEOMETRY = StoreGeometry(
    job=JOB,
    rank=Rank(0),
    attempt=Attempt(1),
    ssd=SsdIndex(0),
    ssd_weights=(1,),
    formats=BF16,
    chunk_numel=CHUNK_NUMEL,
    chunks_per_block=(3, 3),
)
KEYS = [ChunkKey(BlockIndex(block), ChunkIndex(chunk)) for block in range(2) for chunk in range(3)]
WAIT_S = 30.0
# Makes the SSD hang; returns the event that says so and the event that ends it.
Hang = Callable[..., tuple[threading.Event, threading.Event]]


def threads(num_threads: int) -> IoSettings:
    return IoSettings(backend=Backend.THREADS, num_threads=num_threads, depth=1, piece_nbytes=1 << 20)


def commit_of(step: int, attempt: int = 1, *, states_step: int | None = None, job: JobId = JOB) -> CommitStore:
    return CommitStore(
        job=job,
        step=Step(step),
        attempt=Attempt(attempt),
        states_step=Step(step if states_step is None else states_step),
        trainer_state=f"[{step}]",
    )


class Bench:
    """A server, its arena, and the messages that it sent, in order."""

    def __init__(
        self,
        directory: Path,
        num_threads: int = 4,
        geometry: StoreGeometry = GEOMETRY,
        max_open_chunks: int = 100,
        io: IoSettings | None = None,
        num_scratch_slots: int = 0,
    ) -> None:
        self.directory = directory
        self.arena = Arena.create(directory / f"arena-{len(list(directory.glob('arena-*')))}", len(KEYS) * CHUNK_NBYTES)
        self.sent: queue.SimpleQueue[tuple[ActorName, Message]] = queue.SimpleQueue()
        self.spans: list[WorkSpan] = []
        self.space: list[MemoryReported] = []
        self.server = SsdServer(
            ActorName("ssd-0"),
            str(directory),
            geometry,
            str(self.arena.path),
            lambda to, message: self.sent.put((to, message)),
            io=io or threads(num_threads),
            direct=False,
            max_open_chunks=max_open_chunks,
            num_scratch_slots=num_scratch_slots,
        )

    def setup(self) -> None:
        """Starts the server as a job does."""
        self.server.setup()
        self.server.resume_from(last_common_commit([self.server.commits()]))

    def last_step(self) -> int | None:
        commits = self.server.commits()
        return commits[-1].step if commits else None

    def next(self) -> tuple[ActorName, Message]:
        """The next message, without reports of spans and of space, which come at any time."""
        while isinstance(message := (sent := self.sent.get(timeout=WAIT_S))[1], SpansReported | MemoryReported):
            if isinstance(message, SpansReported):
                self.spans += message.spans
            else:
                self.space.append(message)
        return sent

    def is_silent(self) -> bool:
        """Checks that the server has sent nothing more than reports of spans and of space."""
        while not self.sent.empty():
            message = self.sent.get()[1]
            if isinstance(message, SpansReported):
                self.spans += message.spans
            elif not isinstance(message, MemoryReported):
                return False
        return True

    def items(self, keys: Sequence[ChunkKey], *, gradient: bool) -> tuple[ChunkIo, ...]:
        """The parts of each chunk: all states, or the gradient. A chunk has the same place in the arena as in KEYS."""
        return tuple(ChunkIo(key, self.parts(key, gradient=gradient)) for key in keys)

    def parts(self, key: ChunkKey, *, gradient: bool) -> tuple[ChunkPart, ...]:
        offset = KEYS.index(key) * CHUNK_NBYTES
        if gradient:
            return (ChunkPart(StateKind.GRAD, Span(offset, GRADIENT_NBYTES)),)
        parts = []
        for kind, itemsize in BF16.itemsizes.items():
            parts.append(ChunkPart(kind, Span(offset, itemsize * CHUNK_NUMEL)))
            offset += itemsize * CHUNK_NUMEL
        return tuple(parts)

    def read(self, keys: Sequence[ChunkKey], **facts: Any) -> None:
        self._ask(ReadChunks, keys, **facts)

    def write(self, keys: Sequence[ChunkKey], **facts: Any) -> None:
        self._ask(WriteChunks, keys, **facts)

    def _ask(
        self,
        kind: type[ReadChunks] | type[WriteChunks],
        keys: Sequence[ChunkKey],
        *,
        step: int = 0,
        id: int = 1,
        priority: tuple[int, int] = (0, 0),
        deadline_s: float = WAIT_S,
        gradient: bool = False,
    ) -> None:
        request = kind(
            job=JOB,
            step=Step(step),
            correlation=CorrelationId(id),
            reply_to=WORKER,
            priority=priority,
            deadline_s=deadline_s,
            items=self.items(keys, gradient=gradient),
        )
        self.server.post(request)

    def write_activations(self, slots: Sequence[int], span: Span, **facts: Any) -> None:
        self._ask_activations(WriteActivations, slots, span, **facts)

    def read_activations(self, slots: Sequence[int], span: Span, **facts: Any) -> None:
        self._ask_activations(ReadActivations, slots, span, **facts)

    def _ask_activations(
        self,
        kind: type[ReadActivations] | type[WriteActivations],
        slots: Sequence[int],
        span: Span,
        *,
        id: int = 1,
        priority: tuple[int, int] = (0, 0),
        deadline_s: float = WAIT_S,
        block: int = 5,
    ) -> None:
        request = kind(
            job=JOB,
            step=Step(3),
            correlation=CorrelationId(id),
            reply_to=WORKER,
            priority=priority,
            deadline_s=deadline_s,
            block=BlockIndex(block),
            slots=tuple(slots),
            span=span,
        )
        self.server.post(request)

    def wait_done(self, count: int = len(KEYS)) -> None:
        """Waits until `count` chunks or activations have moved, and checks that no other message came between."""
        for _ in range(count):
            assert isinstance(self.next()[1], ChunkIoDone | ActivationIoDone)

    def write_all(self, step: int = 0) -> None:
        self.write(KEYS, step=step)
        self.wait_done()

    def commit(self, step: int, attempt: int = 1, *, states_step: int | None = None) -> None:
        self.server.post(commit_of(step, attempt, states_step=states_step))

    def fill(self, seed: int) -> bytes:
        content = random.Random(seed).randbytes(1 << 20) * (self.arena.nbytes >> 20)
        self.arena.buffer(Span(0, self.arena.nbytes))[:] = content
        return content

    def content(self) -> bytes:
        return bytes(self.arena.buffer(Span(0, self.arena.nbytes)))


@contextlib.contextmanager
def running(bench: Bench) -> Iterator[Bench]:
    """Starts the bench's server, and stops it at the end."""
    bench.setup()
    yield bench
    bench.server.stop()


def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fails as a read or write on a broken SSD does."""
    raise OSError(errno.EIO, "Input/output error")


def failure_of(sent: tuple[ActorName, Message]) -> ActorFailed:
    """The failure that the server reported to its scheduler."""
    to, message = sent
    assert to == "scheduler"
    assert isinstance(message, ActorFailed)
    assert message.actor == "ssd-0"
    return message
