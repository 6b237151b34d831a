"""A test bench of the I/O scheduler: the space of a small job on a directory, an arena, and the ends of requests."""

import contextlib
import errno
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.storage.stores import BF16
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import (
    Attempt,
    BlockIndex,
    ChunkIndex,
    ChunkKey,
    JobId,
    Rank,
    Span,
    SsdIndex,
    StateKind,
    Step,
)
from windlass.storage.io.engines import Backend, IoSettings
from windlass.storage.io_scheduler.requests import CommitRequest, IoResult, IoTerms
from windlass.storage.io_scheduler.scheduler import IoScheduler
from windlass.storage.memory.arena import Arena
from windlass.storage.store.format import StoreGeometry
from windlass.storage.store.job_space import JobSpace
from windlass.storage.store.recovery import recover

JOB = JobId("ftjob-1")
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
ARENA_NBYTES = len(KEYS) * CHUNK_NBYTES
WAIT_S = 30.0
# Makes the SSD hang; returns the event that says so and the event that ends it.
Hang = Callable[..., tuple[threading.Event, threading.Event]]


def threads(num_threads: int, piece_nbytes: int = 1 << 20) -> IoSettings:
    return IoSettings(backend=Backend.THREADS, num_threads=num_threads, depth=1, piece_nbytes=piece_nbytes)


def parts_of(key: ChunkKey, *, gradient: bool = False) -> list[tuple[StateKind, Span]]:
    """The parts of a chunk: all states, or the gradient. A chunk has the same place in the arena as in KEYS."""
    offset = KEYS.index(key) * CHUNK_NBYTES
    if gradient:
        return [(StateKind.GRAD, Span(offset, GRADIENT_NBYTES))]
    parts = []
    for kind, itemsize in BF16.itemsizes.items():
        parts.append((kind, Span(offset, itemsize * CHUNK_NUMEL)))
        offset += itemsize * CHUNK_NUMEL
    return parts


@dataclass(frozen=True)
class End:
    """The end of a request."""

    id: int
    of: ChunkKey | tuple[int, ...] | int  # the chunk, the scratch slots, or the step of a commit
    outcome: IoResult | Exception

    @property
    def result(self) -> IoResult:
        assert isinstance(self.outcome, IoResult), self.outcome
        return self.outcome

    @property
    def error(self) -> Exception:
        assert isinstance(self.outcome, Exception), self.outcome
        return self.outcome


class IoBench:
    """An I/O scheduler, its arena, and the ends of its requests, in order."""

    def __init__(
        self,
        directory: Path,
        num_threads: int = 4,
        *,
        io: IoSettings | None = None,
        geometry: StoreGeometry = GEOMETRY,
        direct: bool = False,
        checksums: bool = True,
        max_open: int = 100,
        num_scratch_slots: int = 0,
        deadline_s: float = WAIT_S,
    ) -> None:
        self.token = CancelToken(deadline_s)
        self.directory = directory
        self.ended: queue.SimpleQueue[End] = queue.SimpleQueue()
        self.arena = Arena.create(directory / f"arena-{len(list(directory.glob('arena-*')))}", ARENA_NBYTES)
        self.space = JobSpace.open(directory, geometry, direct=direct, num_scratch_slots=num_scratch_slots)
        self.space.store.resume_from(recover([self.space.journal()], None).resume_from)
        self.io = IoScheduler.start(
            "ssd-0",
            self.space,
            self.arena,
            self.token,
            io or threads(num_threads),
            checksums=checksums,
            max_open=max_open,
        )

    def holding_queue(self) -> contextlib.AbstractContextManager[object]:
        """The threads of the scheduler take nothing from the queue within the context."""
        return self.io._changed

    def last_step(self) -> int | None:
        commits = self.space.store.commits()
        return commits[-1].step if commits else None

    def next(self) -> End:
        return self.ended.get(timeout=WAIT_S)

    def is_silent(self) -> bool:
        return self.ended.empty()

    def terms(
        self,
        id: int,
        of: ChunkKey | tuple[int, ...],
        *,
        priority: tuple[int, int] = (0, 0),
    ) -> IoTerms:
        def end(outcome: IoResult | Exception) -> None:
            self.ended.put(End(id, of, outcome))

        return IoTerms(priority=priority, on_done=end, on_failed=end)

    def read(
        self, keys: Sequence[ChunkKey], *, step: int = 0, id: int = 1, gradient: bool = False, **urgency: object
    ) -> None:
        for key in keys:
            self.io.read(key, Step(step), parts_of(key, gradient=gradient), self.terms(id, key, **urgency))  # type: ignore[arg-type]

    def write(
        self, keys: Sequence[ChunkKey], *, step: int = 0, id: int = 1, gradient: bool = False, **urgency: object
    ) -> None:
        for key in keys:
            self.io.write(key, Step(step), parts_of(key, gradient=gradient), self.terms(id, key, **urgency))  # type: ignore[arg-type]

    def read_scratch(self, slots: Sequence[int], span: Span, *, id: int = 1, **urgency: object) -> None:
        self.io.read_scratch(slots, span, self.terms(id, tuple(slots), **urgency))  # type: ignore[arg-type]

    def write_scratch(self, slots: Sequence[int], span: Span, *, id: int = 1, **urgency: object) -> None:
        self.io.write_scratch(slots, span, self.terms(id, tuple(slots), **urgency))  # type: ignore[arg-type]

    def commit(self, step: int, attempt: int = 1, *, states_step: int | None = None, is_decided: bool = True) -> None:
        """Commits a step, and decides it as soon as it is there."""

        def end(outcome: IoResult | Exception) -> None:
            if is_decided and isinstance(outcome, IoResult):
                self.io.decide(Step(step))
            self.ended.put(End(0, step, outcome))

        self.io.commit(
            CommitRequest(
                step=Step(step),
                attempt=Attempt(attempt),
                trainer_state=f"[{step}]",
                states_step=None if states_step is None else Step(states_step),
                on_done=end,
                on_failed=end,
            )
        )

    def wait_done(self, count: int = len(KEYS)) -> list[End]:
        """Waits until `count` requests have ended, and checks that none of them failed."""
        ends = [self.next() for _ in range(count)]
        assert all(end.result for end in ends)
        return ends

    def write_all(self, step: int = 0) -> None:
        self.write(KEYS, step=step)
        self.wait_done()

    def commit_all(self, step: int = 0) -> None:
        """Writes and commits the states of all chunks."""
        self.write_all(step)
        self.commit(step)
        self.wait_done(1)

    def fill(self, seed: int) -> bytes:
        content = random.Random(seed).randbytes(1 << 20) * (self.arena.nbytes >> 20)
        self.arena.buffer(Span(0, self.arena.nbytes))[:] = content
        return content

    def content(self) -> bytes:
        return bytes(self.arena.buffer(Span(0, self.arena.nbytes)))

    def close(self, *, delete: bool = False) -> None:
        self.io.close()
        self.space.close(delete=delete)
        self.arena.close()


@contextlib.contextmanager
def running(bench: IoBench) -> Iterator[IoBench]:
    """Closes the bench at the end."""
    yield bench
    bench.close()


def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fails as a read or write on a broken SSD does."""
    raise OSError(errno.EIO, "Input/output error")
