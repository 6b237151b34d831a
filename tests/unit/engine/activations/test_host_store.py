import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine.activation_runs import Run
from tests.support.engine.architectures import ARCHITECTURES, make_batch, make_model
from tests.support.fake_cuda import FakeCuda
from tests.support.late_streams import LateStreams
from windlass.engine.activations.host_store import ActivationMemoryError, HostActivations
from windlass.engine.activations.store import SwapCounts, SwapWatch
from windlass.engine.device import device as device_module
from windlass.engine.device.cuda_streams import CudaStreams
from windlass.engine.device.device import Device
from windlass.engine.device.streams import Stream, ThreadStream
from windlass.engine.device.tensor_arena import TensorArena
from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import BlockIndex, Span
from windlass.storage.memory.arena import SlotPool

SLOT_NBYTES = 4096
DEADLINE_S = 20.0


class GatedStream(ThreadStream):
    """A stream whose copies wait for a gate."""

    def __init__(self, device: "GatedDevice") -> None:
        super().__init__(device.token, device.start_threads)
        self._device = device

    def run(self, work: Callable[[], object]) -> None:
        def gated() -> None:
            assert self._device.gate.wait(DEADLINE_S)
            if self._device.fails:
                raise RuntimeError("the link is down")
            self._device.num_copies += 1
            work()

        super().run(gated)


class GatedDevice(Device):
    """A device whose copies to the host wait for a gate.

    An error in one of its threads is raised in the thread that waits for an event.
    """

    def __init__(self, deadline_s: float) -> None:
        super().__init__(torch.device("cpu"), token=CancelToken(deadline_s), start_threads=self.start_threads)
        self.gate = threading.Event()
        self.gate.set()
        self.num_copies = 0
        self.fails = False
        self.threads: list[threading.Thread] = []

    def open_stream(self) -> Stream:
        return super().open_stream() if self.threads else GatedStream(self)

    def start_threads(self, targets: Iterable[Callable[[], None]]) -> None:
        for target in targets:
            self.threads.append(threading.Thread(target=self._run, args=(target,), daemon=True))
            self.threads[-1].start()

    def _run(self, target: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError, TimeoutError, InterruptedError):
            target()


class PoisonedSlots(SlotPool):
    """A slot pool that fills released slots with 0xFF."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(
            0, SLOT_NBYTES, memory.nbytes // SLOT_NBYTES, name="activations", token=CancelToken(DEADLINE_S)
        )
        self._memory = memory

    def release(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._memory[span.offset : span.offset + span.nbytes] = 0xFF
        super().release(spans)


class Stage:
    def __init__(
        self,
        num_slots: int = 8,
        *,
        max_leaving_nbytes: int = 1 << 30,
        deadline_s: float = DEADLINE_S,
        watch: SwapWatch | None = None,
    ) -> None:
        self.device = GatedDevice(deadline_s)
        self.memory = torch.full((num_slots * SLOT_NBYTES,), 0xFF, dtype=torch.uint8)
        self.slots = PoisonedSlots(self.memory)
        self.store = HostActivations(
            self.device,
            TensorArena(self.memory),
            self.slots,
            max_leaving_nbytes=max_leaving_nbytes,
            watch=watch,
        )

    def finish_copies(self) -> None:
        """Waits for the copies of both streams."""
        self.device.gate.set()
        self.store._outward.record().wait()
        self.store._inward.record().wait()

    def close(self) -> None:
        self.device.gate.set()
        self.device.token.cancel()
        for thread in self.device.threads:
            thread.join(DEADLINE_S)

    def in_use_nbytes(self) -> int:
        return self.slots.statistics.in_use_nbytes


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def some_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


def test_bytes_come_back_as_they_left_and_their_slots_are_free(stage: Stage) -> None:
    tensors = [some_bytes(nbytes, nbytes) for nbytes in (1, SLOT_NBYTES, 3 * SLOT_NBYTES - 5)]
    handles = [stage.store.put(tensor) for tensor in tensors]
    assert [handle.nbytes for handle in handles] == [1, SLOT_NBYTES, 3 * SLOT_NBYTES - 5]
    assert stage.in_use_nbytes() == 5 * SLOT_NBYTES
    for handle, tensor in zip(reversed(handles), reversed(tensors), strict=True):
        back = stage.store.get(handle)
        assert torch.equal(back, tensor)
        assert (back.storage_offset(), back.untyped_storage().nbytes()) == (0, tensor.nbytes)
    total = 4 * SLOT_NBYTES - 4
    assert stage.store.counts == SwapCounts(out_nbytes=total, in_nbytes=total, held_nbytes=0, peak_held_nbytes=total)
    assert stage.in_use_nbytes() == 0


def test_bytes_in_scattered_slots_come_back_too(stage: Stage) -> None:
    scattered = stage.slots.acquire(8)
    stage.slots.release([scattered[i] for i in (0, 1, 4, 6)])
    tensor = some_bytes(4 * SLOT_NBYTES - 9)
    handle = stage.store.put(tensor)
    assert torch.equal(stage.store.get(handle), tensor)
    assert stage.device.num_copies == 3  # neighbouring slots are copied at once


def test_put_and_prefetch_do_not_wait_for_the_copy(stage: Stage) -> None:
    stage.device.gate.clear()
    tensor = some_bytes(100)
    handle = stage.store.put(tensor)
    stage.store.prefetch(handle)
    assert stage.store.counts.out_nbytes == stage.store.counts.in_nbytes == 0
    stage.device.gate.set()
    assert torch.equal(stage.store.get(handle), tensor)


def test_what_is_dropped_frees_its_slots_after_its_copy(stage: Stage) -> None:
    stage.device.gate.clear()
    handle = stage.store.put(some_bytes(100))
    stage.store.drop(handle)
    assert stage.in_use_nbytes() == SLOT_NBYTES  # the copy still writes there
    prefetched = stage.store.put(some_bytes(100))
    stage.store.prefetch(prefetched)
    stage.store.drop(prefetched)
    stage.finish_copies()
    assert stage.in_use_nbytes() == 0
    assert stage.store.counts.held_nbytes == 0


def test_full_memory_is_an_error_that_says_so(stage: Stage) -> None:
    stage.store.put(some_bytes(6 * SLOT_NBYTES))
    with pytest.raises(ActivationMemoryError, match=r"3 slots of 4.00 KiB.*24.00 KiB of 32.00 KiB are in use"):
        stage.store.put(some_bytes(3 * SLOT_NBYTES))
    assert stage.store.counts.held_nbytes == 6 * SLOT_NBYTES


def test_a_put_waits_for_slots_that_are_about_to_come_free(stage: Stage) -> None:
    for is_prefetched in (False, True):
        stage.device.gate.clear()
        dropped = stage.store.put(some_bytes(8 * SLOT_NBYTES))
        if is_prefetched:
            stage.store.prefetch(dropped)
        stage.store.drop(dropped)
        threading.Timer(0.05, stage.device.gate.set).start()
        handle = stage.store.put(some_bytes(5 * SLOT_NBYTES))
        assert torch.equal(stage.store.get(handle), some_bytes(5 * SLOT_NBYTES))


def test_room_nbytes_is_the_part_of_a_put_that_fits(stage: Stage) -> None:
    assert stage.store.room_nbytes(9 * SLOT_NBYTES) == 8 * SLOT_NBYTES
    assert stage.store.room_nbytes(3 * SLOT_NBYTES - 5) == 3 * SLOT_NBYTES - 5
    stage.store.put(some_bytes(3 * SLOT_NBYTES))
    stage.device.gate.clear()
    dropped = stage.store.put(some_bytes(4 * SLOT_NBYTES))
    assert stage.store.room_nbytes(100) == 100
    stage.store.drop(dropped)
    threading.Timer(0.05, stage.device.gate.set).start()
    assert stage.store.room_nbytes(2 * SLOT_NBYTES) == 2 * SLOT_NBYTES  # once its copy has ended
    assert stage.store.room_nbytes(9 * SLOT_NBYTES) == 5 * SLOT_NBYTES


def test_bytes_may_come_back_into_memory_of_the_callers(stage: Stage) -> None:
    whole = torch.zeros(3 * SLOT_NBYTES, dtype=torch.uint8)
    handle = stage.store.put(some_bytes(SLOT_NBYTES + 7))
    stage.store.prefetch(handle, whole[SLOT_NBYTES : 2 * SLOT_NBYTES + 7])
    stage.store.get(handle)
    assert torch.equal(whole[SLOT_NBYTES : 2 * SLOT_NBYTES + 7], some_bytes(SLOT_NBYTES + 7))
    assert not whole[:SLOT_NBYTES].any()
    assert not whole[2 * SLOT_NBYTES + 7 :].any()


def test_bytes_in_flight_to_host_are_bounded() -> None:
    stage = Stage(max_leaving_nbytes=250)
    stage.device.gate.clear()
    for _ in range(2):
        stage.store.put(some_bytes(100))
    third = threading.Thread(target=stage.store.put, args=(some_bytes(100),))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    assert stage.store.counts.held_nbytes == 200
    stage.device.gate.set()
    third.join(DEADLINE_S)
    assert stage.store.counts.held_nbytes == 300
    stage.close()


def test_a_hanging_copy_is_an_error_that_says_so() -> None:
    stage = Stage(max_leaving_nbytes=0, deadline_s=0.05)
    stage.device.gate.clear()
    handle = stage.store.put(some_bytes(100))
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for 100 bytes of activations to reach host memory"):
        stage.store.put(some_bytes(100))
    with pytest.raises(TimeoutError, match=r"100 bytes"):
        stage.store.get(handle)
    stage.close()


@pytest.mark.parametrize("waits_for", ["room in flight", "slots", "the copy back"])
def test_cancel_ends_the_waits(waits_for: str) -> None:
    stage = Stage(max_leaving_nbytes=0 if waits_for == "room in flight" else 1 << 30)
    stage.device.gate.clear()
    handle = stage.store.put(some_bytes(100))
    calls: dict[str, Callable[[], object]] = {
        "room in flight": lambda: stage.store.put(some_bytes(100)),
        "slots": lambda: stage.store.room_nbytes(stage.memory.nbytes),
        "the copy back": lambda: stage.store.get(handle),
    }
    if waits_for == "slots":
        stage.store.drop(handle)
    threading.Timer(0.05, stage.device.token.cancel).start()
    with pytest.raises(InterruptedError, match="the job was stopped"):
        calls[waits_for]()
    stage.close()
    stage.store.close()
    assert stage.in_use_nbytes() == 0


def test_a_failed_copy_raises_where_its_bytes_are_needed(stage: Stage) -> None:
    stage.device.fails = True
    handle = stage.store.put(some_bytes(100))
    with pytest.raises(RuntimeError, match="the link is down"):
        stage.store.get(handle)


class Watch:
    """Records its calls."""

    def __init__(self) -> None:
        self.name = "nobody"
        self.moves: list[tuple[object, int, bool]] = []
        self.waits: list[object] = []

    def owner(self) -> object:
        return self.name

    def moved(self, owner: object, start_s: float, end_s: float, nbytes: int, *, is_out: bool) -> None:
        assert start_s <= end_s
        self.moves.append((owner, nbytes, is_out))

    def waited(self, owner: object, start_s: float, end_s: float) -> None:
        assert start_s <= end_s
        self.waits.append(owner)


def test_a_watch_is_told_of_every_move() -> None:
    watch = Watch()
    stage = Stage(max_leaving_nbytes=200, watch=watch)
    watch.name = "first"
    first = stage.store.put(some_bytes(60))
    watch.name = "second"
    second = stage.store.put(some_bytes(70))
    stage.store.prefetch(second)
    stage.store.drop(first)
    stage.finish_copies()
    stage.store.get(second)
    stage.close()
    assert watch.moves == [("first", 60, True), ("second", 70, True), ("second", 70, False)]
    assert watch.waits == []  # all requested bytes were present


def test_a_watch_is_told_of_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    stage = Stage(max_leaving_nbytes=100, watch=watch)

    def open_first(wait: Any) -> Any:
        """Opens the gate for the copies when this thread begins to wait for them."""

        def opened(*args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                stage.device.gate.set()
            return wait(*args)

        return opened

    monkeypatch.setattr(stage.store._changed, "wait_for", open_first(stage.store._changed.wait_for))
    monkeypatch.setattr(stage.device.compute, "wait", open_first(stage.device.compute.wait))
    stage.device.gate.clear()
    first = stage.store.put(some_bytes(60))
    assert watch.waits == []
    watch.name = "second"
    second = stage.store.put(some_bytes(70))
    assert watch.waits == ["second"]  # for the first one's write to end
    stage.store.drop(first)
    stage.device.gate.clear()
    third = stage.store.put(some_bytes(20))
    watch.name = "third"
    stage.store.get(third)
    assert watch.waits == ["second", "third"]
    stage.store.drop(second)
    stage.close()


@pytest.mark.parametrize(
    "policy",
    [
        BlockActivations(recompute=False, swap_input=True, swapped=frozenset({"*"})),
        BlockActivations(swap_input=True, swapped=frozenset({"aten.mm.default", "aten.addmm.default"})),
    ],
    ids=["all swapped", "matrix products swapped"],
)
def test_a_step_through_host_memory_gives_the_same_gradients(policy: BlockActivations) -> None:
    model = make_model(ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.1))
    batch, targets = make_batch((2, 16), (1, 9))
    expected = Run(model).step(batch, targets)
    stage = Stage(num_slots=400)
    activations = {BlockIndex(b): policy for b in (1, 2, 3)}
    found = Run(model, activations=activations, store=stage.store).step(batch, targets)
    stage.close()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    counts = stage.store.counts
    assert counts.out_nbytes >= counts.in_nbytes > 0
    assert counts.peak_held_nbytes <= stage.slots.statistics.high_water_nbytes
    assert stage.in_use_nbytes() == counts.held_nbytes == 0


# --- on streams that run late --------------------------------------------------------------------------------------


class LateStage:
    """A store on streams that run late. The test's thread submits work, as a GPU's host thread does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, order: object, num_slots: int = 8, **options: Any) -> None:
        def open_streams(device: torch.device, token: CancelToken, start_threads: Any) -> LateStreams:
            self.streams = LateStreams(start_threads, token=token, order=order, **options)  # type: ignore[arg-type]
            return self.streams

        monkeypatch.setattr(device_module, "open_streams", open_streams)
        self.device = Device(torch.device("cpu"))
        monkeypatch.setattr(self.device, "empty", lambda nbytes: torch.full((nbytes,), 0xFF, dtype=torch.uint8))
        self.memory = torch.full((num_slots * SLOT_NBYTES,), 0xFF, dtype=torch.uint8)
        self.slots = PoisonedSlots(self.memory)
        self.store = HostActivations(self.device, TensorArena(self.memory), self.slots, max_leaving_nbytes=1 << 30)

    def send_around(self, num_rounds: int, *, prefetches: bool) -> bool:
        """Returns whether tensors that are computed, swapped out and back are unchanged.

        Four of them fill all slots.
        """
        found: list[torch.Tensor] = []
        expected: list[torch.Tensor] = []
        for i in range(num_rounds):
            tensors = [torch.zeros(SLOT_NBYTES + 1, dtype=torch.uint8) for _ in range(4)]
            expected += [torch.full_like(tensor, 10 * i + j) for j, tensor in enumerate(tensors)]
            for tensor, value in zip(tensors, expected[-4:], strict=True):
                self.device.compute.run(partial(tensor.copy_, value))
            handles = [self.store.put(tensor) for tensor in tensors]
            del tensors, tensor
            for handle in handles if prefetches else ():
                self.store.prefetch(handle)
            for handle in handles:
                back = self.store.get(handle)
                self.device.compute.run(lambda back=back: found.append(back.clone()))
        assert not self.streams.host_waits
        self.device.compute.record().wait()
        return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


LATE_ORDERS = [*permutations(("compute", "h2d", "d2h")), 1]


@pytest.mark.parametrize("prefetches", [True, False])
@pytest.mark.parametrize("order", LATE_ORDERS, ids=str)
def test_host_threads_do_not_wait_for_copies(monkeypatch: pytest.MonkeyPatch, order: object, prefetches: bool) -> None:
    stage = LateStage(monkeypatch, order)
    assert stage.send_around(3, prefetches=prefetches)
    stage.device.token.cancel()


@pytest.mark.parametrize("forgotten", [("d2h", "compute"), ("h2d", "d2h"), ("compute", "h2d")], ids=str)
def test_each_wait_is_needed(monkeypatch: pytest.MonkeyPatch, forgotten: tuple[str, str]) -> None:
    right = []
    for order in LATE_ORDERS:
        stage = LateStage(monkeypatch, order, forgets=lambda *pair: pair == forgotten)
        right.append(stage.send_around(3, prefetches=True))
        stage.device.token.cancel()
    assert not all(right)


def test_put_waits_for_slots_that_are_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = LateStage(monkeypatch, ("compute", "d2h", "h2d"))
    for i in range(3):
        tensor = some_bytes(6 * SLOT_NBYTES, i)
        back = stage.store.get(stage.store.put(tensor))
        stage.device.compute.record().wait()
        assert torch.equal(back, tensor)
    stage.device.token.cancel()


def test_memory_that_queued_work_still_reads_is_not_written_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's allocator reuses memory as soon as the host has freed it."""
    stage = LateStage(monkeypatch, ("h2d", "d2h", "compute"))
    handle = stage.store.put(some_bytes(100))
    memory, seen = torch.full((100,), 7, dtype=torch.uint8), []
    stage.device.compute.run(lambda: seen.append(memory.clone()))
    monkeypatch.setattr(stage.device, "empty", lambda nbytes: memory)
    back = stage.store.get(handle)
    stage.device.compute.record().wait()
    assert torch.equal(seen[0], torch.full((100,), 7, dtype=torch.uint8))
    assert torch.equal(back, some_bytes(100))
    stage.device.token.cancel()


class TestCuda:
    """Work begins when it is submitted, so its memory must stay allocated until it has ended."""

    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        cuda = FakeCuda()
        cuda.install(monkeypatch)
        monkeypatch.setattr(device_module, "open_streams", CudaStreams)
        return cuda

    def test_memory_is_held_until_it_was_copied(self, cuda: FakeCuda) -> None:
        device = Device(torch.device("cpu"))
        memory = torch.zeros(8 * SLOT_NBYTES, dtype=torch.uint8)
        slots = PoisonedSlots(memory)
        store = HostActivations(device, TensorArena(memory), slots, max_leaving_nbytes=1 << 30)
        cuda.may_synchronize.clear()
        tensor = some_bytes(100)
        handle, leaving = store.put(tensor), weakref.ref(tensor.untyped_storage())
        del tensor
        gc.collect()
        assert leaving() is not None
        store.prefetch(handle)
        coming = weakref.ref(store._held[handle].back[0])  # type: ignore[index]
        store.drop(handle)
        gc.collect()
        assert coming() is not None
        assert slots.statistics.in_use_nbytes == SLOT_NBYTES
        cuda.may_synchronize.set()
        until_s = time.monotonic() + DEADLINE_S
        while (leaving(), coming(), slots.statistics.in_use_nbytes) != (None, None, 0) and time.monotonic() < until_s:
            time.sleep(0.001)
        gc.collect()
        assert (leaving(), coming(), slots.statistics.in_use_nbytes) == (None, None, 0)
        device.token.cancel()
