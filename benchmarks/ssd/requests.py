"""Sends requests to an SSD server as an optimizer does: several chunks in flight, descriptors only."""

import threading
import time
from collections.abc import Callable
from enum import StrEnum
from itertools import cycle
from pathlib import Path

from windlass.actors.messages import (
    ActorFailed,
    ChunkIo,
    ChunkIoDone,
    ChunkPart,
    Message,
    ReadChunks,
    WriteChunks,
)
from windlass.storage.ids import (
    ActorName,
    Attempt,
    BlockIndex,
    ChunkIndex,
    ChunkKey,
    CorrelationId,
    Formats,
    JobId,
    Precision,
    Rank,
    Span,
    SsdIndex,
    StateKind,
    StatePrecision,
    Step,
)
from windlass.storage.memory import Arena
from windlass.storage.store import StoreGeometry
from windlass.storage.store.format import CHUNK_NUMEL_UNIT

JOB = JobId("ssd-benchmark")
REQUESTER = ActorName("requester")
SERVER = ActorName("ssd-0")
_FORMATS = Formats(Precision.BF16, StatePrecision.FP32)
ITEMSIZE = sum(_FORMATS.itemsizes.values())
_DEADLINE_S = 120.0  # timeout of a request


class Traffic(StrEnum):
    """The direction of transfers."""

    READ = "read"  # all states of a chunk
    WRITE = "write"
    MIX = "mix"  # like an update: reads master and moments, writes all states


READ_KINDS = {
    Traffic.READ: tuple(_FORMATS.itemsizes),
    Traffic.MIX: _FORMATS.kinds_to_update,
}
READ_SHARE = {Traffic.READ: 1.0, Traffic.WRITE: 0.0, Traffic.MIX: 12 / 26}


def geometry_of(request_nbytes: int, working_set_nbytes: int) -> StoreGeometry:
    """Returns a store whose chunks have states of `request_nbytes`, rounded down to a valid chunk size."""
    numel = max(1, request_nbytes // ITEMSIZE // CHUNK_NUMEL_UNIT) * CHUNK_NUMEL_UNIT
    return StoreGeometry(
        job=JOB,
        rank=Rank(0),
        attempt=Attempt(1),
        ssd=SsdIndex(0),
        ssd_weights=(1,),
        formats=_FORMATS,
        chunk_numel=numel,
        chunks_per_block=(max(2, working_set_nbytes // (numel * ITEMSIZE)),),
    )


class Requester:
    """Requests chunks of one store. `post` receives the answers, from any thread."""

    def __init__(self, geometry: StoreGeometry, arena_path: Path, num_in_flight: int) -> None:
        self._geometry = geometry
        self._num_in_flight = num_in_flight
        self.send: Callable[[ActorName, Message], None]  # set before the first request
        self._arena = Arena.open(arena_path)
        self._changed = threading.Condition()
        self._answers: list[Message] = []
        self._keys = [ChunkKey(BlockIndex(0), ChunkIndex(i)) for i in range(geometry.num_chunks)]
        self._correlation = 0

    def post(self, message: Message) -> None:
        """Receives an answer."""
        with self._changed:
            self._answers.append(message)
            self._changed.notify()

    def prepare(self) -> None:
        """Writes every chunk, so that no timed write is the first one."""
        memory = self._arena.buffer(Span(0, self._arena.nbytes))
        block = bytes(range(256)) * 4096
        for start in range(0, memory.nbytes, len(block)):
            memory[start : start + len(block)] = block[: memory.nbytes - start]
        self._run(Traffic.WRITE, len(self._keys), until_s=0.0)

    def measure(self, traffic: Traffic, seconds: float) -> float:
        """Returns bytes per second, with `num_in_flight` chunks in flight, measured for about `seconds`."""
        start_s = time.perf_counter()
        num_chunks = self._run(traffic, 2 * self._num_in_flight, until_s=start_s + seconds)
        per_numel = {Traffic.READ: ITEMSIZE, Traffic.WRITE: ITEMSIZE, Traffic.MIX: 12 + ITEMSIZE}[traffic]
        return num_chunks * self._geometry.chunk_numel * per_numel / (time.perf_counter() - start_s)

    def latency_s(self, nbytes: int) -> float:
        """Returns the seconds from a request for one state of one chunk to its answer, with nothing else in flight."""
        start_s = time.perf_counter()
        self._ask(ReadChunks, Step(0), [self._item(0, (StateKind.MASTER,), 0, nbytes)])
        self._answers_so_far()
        return time.perf_counter() - start_s

    def close(self) -> None:
        """Unmaps the arena."""
        self._arena.close()

    def _run(self, traffic: Traffic, min_chunks: int, *, until_s: float) -> int:
        """Keeps all slots busy. Each slot holds one chunk, which is read, written, or both, depending on the traffic.

        Chunks that can be requested at the same time are in one request.
        """
        begun = done = 0
        keys = cycle(self._keys)
        slot_of: dict[ChunkKey, int] = {}  # slots of the chunks in flight
        reading: set[ChunkKey] = set()
        free, to_write = list(range(self._num_in_flight)), list[ChunkKey]()
        while True:
            to_read: list[ChunkKey] = []
            while free and (begun < min_chunks or time.perf_counter() < until_s):
                key = next(key for key in keys if key not in slot_of)  # skip a chunk that is still in flight
                slot_of[key] = free.pop()
                begun += 1
                (to_write if traffic is Traffic.WRITE else to_read).append(key)
            reading.update(to_read)
            self._ask(
                ReadChunks, Step(0), [self._item(key.chunk, READ_KINDS[traffic], slot_of[key]) for key in to_read]
            )
            writes = [self._item(key.chunk, tuple(_FORMATS.itemsizes), slot_of[key]) for key in to_write]
            self._ask(WriteChunks, Step(0), writes)
            to_write = []
            if not slot_of:
                return done
            for answer in self._answers_so_far():
                if traffic is Traffic.MIX and answer.key in reading:
                    to_write.append(answer.key)
                else:
                    done += 1
                    free.append(slot_of.pop(answer.key))
                reading.discard(answer.key)

    def _item(self, chunk: int, states: tuple[StateKind, ...], slot: int, nbytes: int | None = None) -> ChunkIo:
        offset = slot * self._geometry.extent_nbytes
        parts = tuple(
            ChunkPart(
                state,
                Span(offset + self._geometry.region_offset(state), nbytes or self._geometry.region_nbytes(state)),
            )
            for state in states
        )
        return ChunkIo(self._keys[chunk], parts)

    def _ask(self, kind: type[ReadChunks] | type[WriteChunks], step: Step, items: list[ChunkIo]) -> None:
        if not items:
            return
        self._correlation += 1
        request = kind(
            job=JOB,
            step=step,
            correlation=CorrelationId(self._correlation),
            reply_to=REQUESTER,
            priority=(0, 0),
            items=tuple(items),
        )
        self.send(SERVER, request)

    def _answers_so_far(self) -> list[ChunkIoDone]:
        """Returns all answers so far, and waits for at least one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._answers, timeout=_DEADLINE_S):
                raise TimeoutError("the SSD server does not answer")
            answers, self._answers = self._answers, []
        for answer in answers:
            if isinstance(answer, ActorFailed):
                raise RuntimeError(answer.error)
        return [answer for answer in answers if isinstance(answer, ChunkIoDone)]
