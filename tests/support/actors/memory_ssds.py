"""A stand-in for the other actors of a job: SSD servers that keep states in memory, and a log of sent messages."""

import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from windlass.actors.job.context import JobContext
from windlass.actors.messages import (
    ChunkIo,
    ChunkIoDone,
    DescribeStatus,
    Message,
    ReadChunks,
    StatusDescribed,
    WriteChunks,
)
from windlass.storage.ids import ActorName, ChunkKey, StateKind, Step
from windlass.storage.memory.arena import Arena

WAIT_S = 30.0
AnyMessage = TypeVar("AnyMessage", bound=Message)


class MemorySsds:
    """All SSD servers of a job.

    The actor under test sends to `send`. It is answered at once unless `hold` is set.
    """

    def __init__(self, context: JobContext, arena: Arena) -> None:
        self.context = context
        self.arena = arena
        self.states: dict[tuple[Step, ChunkKey, StateKind], bytes] = {}
        self.sent: list[tuple[ActorName, Message]] = []
        self.answer: Callable[[Message], None] = lambda message: None  # the actor's `post`
        self.hold = False
        self.held: list[ReadChunks | WriteChunks] = []
        self.num_open_writes = 0  # chunks whose write was requested and not answered
        self._changed = threading.Condition()

    def send(self, to: ActorName, message: Message) -> None:
        """Receives a message of the actor under test."""
        with self._changed:
            self.sent.append((to, message))
            self._changed.notify_all()
        if isinstance(message, ReadChunks | WriteChunks):
            for item in message.items:
                assert to == f"ssd-{self.context.geometry(0).ssd_of(item.key)}"
            if self.hold:
                self.held.append(message)
            else:
                self.serve(message)

    def serve(self, request: ReadChunks | WriteChunks) -> None:
        """Moves the bytes of a request, and answers for each chunk."""
        for item in request.items:
            self._move(request, item)
            done = ChunkIoDone(job=request.job, step=request.step, correlation=request.correlation, key=item.key)
            self.answer(done)

    def _move(self, request: ReadChunks | WriteChunks, item: ChunkIo) -> None:
        for part in item.parts:
            buffer = self.arena.buffer(part.span)
            if isinstance(request, WriteChunks):
                self.states[(request.step, item.key, part.kind)] = bytes(buffer)
            else:
                state = self.states[(request.step, item.key, part.kind)]
                buffer[:] = state.ljust(part.span.nbytes, b"\xff")[: part.span.nbytes]

    def put(self, step: int, key: ChunkKey, kind: StateKind, values: torch.Tensor) -> None:
        """Stores a state as of a step."""
        self.states[(Step(step), key, kind)] = values.contiguous().view(torch.uint8).numpy().tobytes()

    def state(self, step: int, key: ChunkKey, kind: StateKind, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns a stored state, cut to the elements that the chunk holds."""
        raw = bytearray(self.states[(Step(step), key, kind)])
        return torch.frombuffer(raw, dtype=dtype)[: self.context.chunk_numel(key)]

    def of(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        """The messages of one type that were sent, in order."""
        with self._changed:
            return [message for _, message in self.sent if isinstance(message, kind)]

    def await_status(self, pattern: str) -> str:
        """Asks the actor for its status until it matches a pattern, and returns it."""
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            self.answer(DescribeStatus(job=self.context.spec.job, step=Step(0)))
            text = self.of(StatusDescribed)[-1].text
            if re.search(pattern, text):
                return text
            time.sleep(0.01)
        raise AssertionError(text)

    def receive(self, kind: type[AnyMessage], count: int = 1) -> list[AnyMessage]:
        """Waits until at least `count` messages of a type were sent, and returns all of them."""
        until_s = time.monotonic() + WAIT_S
        with self._changed:
            while len(found := [message for _, message in self.sent if isinstance(message, kind)]) < count:
                assert self._changed.wait(until_s - time.monotonic()), f"{len(found)} of {count} {kind.__name__} came"
            return found
