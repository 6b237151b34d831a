"""A loader fills device buffers with chunks, resident or read, and holds their slots until the copies are over."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch

from windlass.engine.device.device import Device
from windlass.engine.device.param_loader import BlockLoad, OnArrival, ParamLoader
from windlass.engine.device.streams import Event
from windlass.engine.device.tensor_arena import TensorArena
from windlass.engine.memory_plan import copy_batches
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import BlockIndex, ChunkIndex, ChunkKey, Span
from windlass.storage.memory.arena import SlotPool

CHUNK_NUMEL, NUMEL, SLOT_NBYTES, DEADLINE_S = 1024, 2500, 4096, 20.0
KEYS = [ChunkKey(BlockIndex(0), ChunkIndex(i)) for i in range(3)]
FLAT = torch.arange(NUMEL, dtype=torch.float32)


class Source:
    """Chunks of one block. Reads are served when the test asks for it."""

    def __init__(self, arena: TensorArena, slots: SlotPool, batch: int) -> None:
        self.arena = arena
        self.slots = slots
        self.batch = batch
        self.resident: dict[ChunkKey, Span] = {}
        self.own: dict[ChunkKey, Span] = {}
        self.reads: list[tuple[dict[ChunkKey, Span], Callable[[ChunkKey], None]]] = []
        self.requested = threading.Semaphore(0)
        self.arrived: list[ChunkKey] = []
        self.copied: list[ChunkKey] = []
        self.batches: list[list[int]] = []  # bytes of the chunks that were copied together
        self.has_copied = threading.Semaphore(0)  # released after each batch
        self.holds: contextlib.AbstractContextManager[object] = contextlib.nullcontext()  # held at the end of copies

    def chunk_range(self, key: ChunkKey) -> tuple[int, int]:
        return key.chunk * CHUNK_NUMEL, min(NUMEL, (key.chunk + 1) * CHUNK_NUMEL)

    def resident_params(self, key: ChunkKey) -> Span | None:
        return self.resident.get(key)

    def request_params(self, load: BlockLoad, keys: Sequence[ChunkKey], on_arrival: OnArrival) -> None:
        for start in range(0, len(keys), self.batch):
            some = keys[start : start + self.batch]
            spans = dict(zip(some, self.slots.acquire(len(some)), strict=True)) | {
                key: self.own[key] for key in some if key in self.own
            }
            self.reads.append((spans, functools.partial(self._has_read, spans, on_arrival)))
            self.requested.release()

    def _has_read(self, spans: Mapping[ChunkKey, Span], on_arrival: OnArrival, key: ChunkKey) -> None:
        on_arrival(key, spans[key], key not in self.own)

    def release_params(self, load: BlockLoad, slots: Mapping[ChunkKey, Span]) -> None:
        self.slots.release(list(slots.values()))

    def serve(self) -> None:
        assert self.requested.acquire(timeout=DEADLINE_S)
        spans, on_done = self.reads.pop(0)
        for key, span in spans.items():
            self.fill(key, span)
            on_done(key)

    def fill(self, key: ChunkKey, span: Span) -> None:
        start, stop = self.chunk_range(key)
        self.arena.view(span.offset, stop - start, torch.float32).copy_(FLAT[start:stop])

    def naming(self, load: BlockLoad, callback: Callable[[], None]) -> Callable[[], None]:
        return callback

    def chunk_arrived(self, load: BlockLoad, key: ChunkKey, params: torch.Tensor) -> None:
        self.arrived.append(key)

    def chunks_copied(self, load: BlockLoad, nbytes: Mapping[ChunkKey, int], begun: Event, copied: Event) -> None:
        with self.holds:
            self.copied += nbytes
            self.batches.append(list(nbytes.values()))
            self.has_copied.release()


class Bench:
    def __init__(self, num_slots: int, batch: int) -> None:
        self.arena = TensorArena(torch.full((8 * SLOT_NBYTES,), 0xFF, dtype=torch.uint8))
        self.token = CancelToken(DEADLINE_S)
        self.slots = SlotPool(0, SLOT_NBYTES, num_slots, token=self.token)
        self.source = Source(self.arena, self.slots, batch)
        self.loader: ParamLoader[BlockLoad] = ParamLoader(
            self.source,
            Device(torch.device("cpu"), token=self.token),
            self.arena,
            torch.float32,
        )
        self.thread = threading.Thread(target=self.loader.run, daemon=True)
        self.thread.start()

    def start(self, load: BlockLoad) -> None:
        def request() -> None:
            with contextlib.suppress(InterruptedError):  # a test may end while this waits for slots
                self.loader.start(load, KEYS)

        threading.Thread(target=request, daemon=True).start()

    def stop(self) -> None:
        self.token.cancel()
        self.thread.join(DEADLINE_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(num_slots=2, batch=2)
    yield bench
    bench.stop()


def new_load(first: int = 0) -> BlockLoad:
    return BlockLoad(buffer=torch.full((NUMEL - first,), torch.nan), first=first, num_missing=len(KEYS))


def test_missing_chunks_are_read_in_batches_and_fill_buffer(bench: Bench) -> None:
    load = new_load()
    bench.start(load)
    bench.source.serve()
    assert not load.is_ready
    bench.source.serve()  # its slots are those of the first batch
    bench.loader.wait_for(load, "the copies")
    assert load.copied is not None
    assert torch.equal(load.buffer, FLAT)
    assert bench.source.arrived == bench.source.copied == KEYS
    bench.slots.drain()


def test_resident_chunks_are_copied_without_slot(bench: Bench) -> None:
    for i, key in enumerate(KEYS):
        bench.source.resident[key] = Span((4 + i) * SLOT_NBYTES, SLOT_NBYTES)
        bench.source.fill(key, bench.source.resident[key])
    held = bench.slots.acquire(2)
    load = new_load()
    bench.start(load)
    bench.loader.wait_for(load, "the copies")
    assert torch.equal(load.buffer, FLAT)
    assert bench.source.reads == []
    bench.slots.release(held)


def test_params_that_stay_in_host_memory_are_not_released() -> None:
    bench = Bench(num_slots=3, batch=3)
    bench.source.own[KEYS[0]] = Span(6 * SLOT_NBYTES, SLOT_NBYTES)
    load = new_load()
    bench.start(load)
    bench.source.serve()
    bench.loader.wait_for(load, "the copies")
    assert torch.equal(load.buffer, FLAT)
    bench.stop()
    assert len(bench.slots.try_acquire(2)) == 2
    assert bench.slots.try_acquire(1) == []


@pytest.mark.parametrize("first", [0, 500, CHUNK_NUMEL, 1500, NUMEL - 1])
def test_elements_before_first_are_not_copied(bench: Bench, first: int) -> None:
    load = new_load(first)
    bench.start(load)
    bench.source.serve()
    bench.source.serve()
    bench.loader.wait_for(load, "the copies")
    assert torch.equal(load.buffer, FLAT[first:])


def test_held_chunks_keep_their_slots() -> None:
    bench = Bench(num_slots=4, batch=3)
    load = new_load(NUMEL - 1)
    load.holds_chunks = True
    bench.start(load)
    bench.source.serve()
    bench.loader.wait_for(load, "the copies")
    assert len(load.held) == len(KEYS)
    assert len(bench.slots.try_acquire(1)) == 1
    assert bench.slots.try_acquire(1) == []
    bench.stop()


def test_chunks_that_are_there_are_copied_together_up_to_the_limit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_batches, "COPY_BATCH_NBYTES", 2 * SLOT_NBYTES)
    for i, key in enumerate(KEYS):
        bench.source.resident[key] = Span((4 + i) * SLOT_NBYTES, SLOT_NBYTES)
        bench.source.fill(key, bench.source.resident[key])
    load = new_load(first=24)
    bench.start(load)
    bench.loader.wait_for(load, "the copies")
    assert torch.equal(load.buffer, FLAT[24:])
    assert bench.source.batches == [[4 * 1000, 4 * 1024], [4 * 452]]


def test_chunk_that_arrives_alone_is_copied_at_once(bench: Bench) -> None:
    load = new_load()
    bench.start(load)
    assert bench.source.requested.acquire(timeout=DEADLINE_S)
    spans, on_done = bench.source.reads.pop(0)
    for number, (key, span) in enumerate(spans.items(), start=1):
        bench.source.fill(key, span)
        on_done(key)
        assert bench.source.has_copied.acquire(timeout=DEADLINE_S)
        assert bench.source.copied == KEYS[:number]


def test_chunks_of_two_blocks_are_not_copied_together(bench: Bench) -> None:
    for i, key in enumerate(KEYS):
        bench.source.resident[key] = Span((4 + i) * SLOT_NBYTES, SLOT_NBYTES)
        bench.source.fill(key, bench.source.resident[key])
    loads, is_held = [new_load() for _ in range(3)], threading.Lock()
    with is_held:
        bench.source.holds = is_held  # at the first block's end, until the others' chunks are there too
        for load in loads:
            bench.loader.start(load, KEYS)
    for load in loads:
        bench.loader.wait_for(load, "the copies")
        assert torch.equal(load.buffer, FLAT)
    assert [len(batch) for batch in bench.source.batches] == [3, 3, 3]
