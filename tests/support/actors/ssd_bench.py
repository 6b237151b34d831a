"""A test bench of the SSD server: a server of a small job, the requests to it and the messages that it sends."""

import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.storage.io_bench import ARENA_NBYTES, GEOMETRY, JOB, KEYS, WAIT_S, parts_of, threads
from windlass.actors.messages import (
    ActivationIoDone,
    ActorFailed,
    ChunkIo,
    ChunkIoDone,
    ChunkPart,
    CommitDecided,
    CommitStore,
    MemoryReported,
    Message,
    ReadActivations,
    ReadChunks,
    SpansReported,
    StoreCommitted,
    WorkSpan,
    WriteActivations,
    WriteChunks,
)
from windlass.actors.ssd.server import SsdServer
from windlass.storage.ids import ActorName, Attempt, BlockIndex, ChunkKey, CorrelationId, JobId, Span, Step
from windlass.storage.memory.arena import Arena
from windlass.storage.store import JobSpace
from windlass.storage.store.format import CommitRecord, StoreGeometry
from windlass.storage.store.recovery import recover

WORKER = ActorName("optimizer-0")


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

    def __init__(self, directory: Path, geometry: StoreGeometry = GEOMETRY, num_scratch_slots: int = 0) -> None:
        self.directory = directory
        self._geometry = geometry
        self._num_scratch_slots = num_scratch_slots
        self.arena = Arena.create(directory / f"arena-{len(list(directory.glob('arena-*')))}", ARENA_NBYTES)
        self.sent: queue.SimpleQueue[tuple[ActorName, Message]] = queue.SimpleQueue()
        self.spans: list[WorkSpan] = []
        self.space: list[MemoryReported] = []

    def open_space(self) -> JobSpace:
        """Opens the job's space on the SSD."""
        return JobSpace.open(
            str(self.directory), self._geometry, direct=False, num_scratch_slots=self._num_scratch_slots
        )

    def start(self, choose: Callable[[list[CommitRecord]], CommitRecord | None] | None = None) -> None:
        """Starts the server as a job does, or from the commit that `choose` returns."""
        self.opened = self.open_space()
        journal = self.opened.journal()
        commit = recover([journal], None).resume_from if choose is None else choose(list(journal.records))
        self.server = SsdServer(
            ActorName("ssd-0"),
            self.opened,
            commit,
            str(self.arena.path),
            lambda to, message: self.sent.put((to, message)),
            io=threads(4),
            deadline_s=WAIT_S,
        )

    def next(self) -> tuple[ActorName, Message]:
        """The next message, without reports of spans and of space, which come at any time.

        A commit is decided as soon as it is there, unless the server is stopped.
        """
        while isinstance(message := (sent := self.sent.get(timeout=WAIT_S))[1], SpansReported | MemoryReported):
            if isinstance(message, SpansReported):
                self.spans += message.spans
            else:
                self.space.append(message)
        if isinstance(message, StoreCommitted):
            with contextlib.suppress(RuntimeError):
                self.server.post(CommitDecided(job=JOB, step=message.step))
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
        gradient: bool = False,
    ) -> None:
        request = kind(
            job=JOB,
            step=Step(step),
            correlation=CorrelationId(id),
            reply_to=WORKER,
            priority=(0, 0),
            items=tuple(
                ChunkIo(key, tuple(ChunkPart(kind, span) for kind, span in parts_of(key, gradient=gradient)))
                for key in keys
            ),
        )
        self.server.post(request)

    def move_activations(
        self,
        kind: type[ReadActivations] | type[WriteActivations],
        slots: Sequence[int],
        span: Span,
        *,
        id: int = 1,
        block: int = 5,
    ) -> None:
        request = kind(
            job=JOB,
            step=Step(3),
            correlation=CorrelationId(id),
            reply_to=WORKER,
            priority=(0, 0),
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


@contextlib.contextmanager
def running(bench: Bench) -> Iterator[Bench]:
    """Starts the bench's server, and stops it at the end."""
    bench.start()
    yield bench
    bench.server.stop()


def failure_of(sent: tuple[ActorName, Message]) -> ActorFailed:
    """The failure that the server reported to its scheduler."""
    to, message = sent
    assert to == "scheduler"
    assert isinstance(message, ActorFailed)
    assert message.actor == "ssd-0"
    return message
