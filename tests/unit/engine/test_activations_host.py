import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.engine.activation_runs import Run
from tests.unit.engine.architectures import ARCHITECTURES, make_batch, make_model
from windlass.engine.activations import SwapCounts, SwapWatch
from windlass.engine.activations_host import ActivationMemoryError, ActivationTimeoutError, HostActivations
from windlass.engine.device import Device
from windlass.planner.activations import BlockActivations
from windlass.storage.arena import SlotPool
from windlass.storage.ids import BlockIndex, Span

SLOT_NBYTES = 4096
DEADLINE_S = 20.0


class GatedDevice(Device):
    """Copies to the host wait for a gate."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.gate = threading.Event()
        self.gate.set()
        self.num_copies = 0
        self.fails = False

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.gate.wait(DEADLINE_S)
        if self.fails:
            raise RuntimeError("the link is down")
        self.num_copies += 1
        super().copy_out(target, source)


class PoisonedSlots(SlotPool):
    """Fills what is released with 0xFF."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(0, SLOT_NBYTES, memory.nbytes // SLOT_NBYTES, name="activations")
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
        self.device = GatedDevice()
        self.memory = torch.full((num_slots * SLOT_NBYTES,), 0xFF, dtype=torch.uint8)
        self.slots = PoisonedSlots(self.memory)
        self.store = HostActivations(
            self.device,
            self.memory,
            self.slots,
            max_leaving_nbytes=max_leaving_nbytes,
            deadline_s=deadline_s,
            watch=watch,
        )

    def in_use_nbytes(self) -> int:
        return self.slots.statistics.in_use_nbytes


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.device.gate.set()
    stage.store.close()


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
    scattered = stage.slots.acquire(8, DEADLINE_S)
    stage.slots.release([scattered[i] for i in (0, 1, 4, 6)])
    tensor = some_bytes(4 * SLOT_NBYTES - 9)
    handle = stage.store.put(tensor)
    assert torch.equal(stage.store.get(handle), tensor)
    assert stage.device.num_copies == 3  # neighbours go at once


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
    stage.device.gate.set()
    stage.store.close()
    assert stage.in_use_nbytes() == 0
    assert stage.store.counts.held_nbytes == 0


def test_full_memory_is_an_error_that_says_so(stage: Stage) -> None:
    stage.store.put(some_bytes(6 * SLOT_NBYTES))
    with pytest.raises(ActivationMemoryError, match=r"12288 bytes.*3 slots of 4096.*24576 of 32768 bytes are in use"):
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


def test_who_shares_a_put_with_another_store_learns_how_much_fits(stage: Stage) -> None:
    assert stage.store.room_nbytes(9 * SLOT_NBYTES) == 8 * SLOT_NBYTES
    assert stage.store.room_nbytes(3 * SLOT_NBYTES - 5) == 3 * SLOT_NBYTES - 5
    stage.store.put(some_bytes(3 * SLOT_NBYTES))
    stage.device.gate.clear()
    dropped = stage.store.put(some_bytes(4 * SLOT_NBYTES))
    assert stage.store.room_nbytes(100) == 100
    stage.store.drop(dropped)
    threading.Timer(0.05, stage.device.gate.set).start()
    assert stage.store.room_nbytes(2 * SLOT_NBYTES) == 2 * SLOT_NBYTES  # once its copy is over
    assert stage.store.room_nbytes(9 * SLOT_NBYTES) == 5 * SLOT_NBYTES


def test_bytes_may_come_back_into_memory_of_the_callers(stage: Stage) -> None:
    whole = torch.zeros(3 * SLOT_NBYTES, dtype=torch.uint8)
    handle = stage.store.put(some_bytes(SLOT_NBYTES + 7))
    stage.store.prefetch(handle, whole[SLOT_NBYTES : 2 * SLOT_NBYTES + 7])
    stage.store.get(handle)
    assert torch.equal(whole[SLOT_NBYTES : 2 * SLOT_NBYTES + 7], some_bytes(SLOT_NBYTES + 7))
    assert not whole[:SLOT_NBYTES].any()
    assert not whole[2 * SLOT_NBYTES + 7 :].any()


def test_what_is_on_its_way_out_is_bounded() -> None:
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
    stage.store.close()


def test_a_hanging_copy_is_an_error_that_says_so() -> None:
    stage = Stage(max_leaving_nbytes=0, deadline_s=0.05)
    stage.device.gate.clear()
    handle = stage.store.put(some_bytes(100))
    with pytest.raises(ActivationTimeoutError, match=r"100 bytes of activations did not reach host memory within 0.05"):
        stage.store.put(some_bytes(100))
    with pytest.raises(ActivationTimeoutError, match=r"100 bytes"):
        stage.store.get(handle)
    stage.device.gate.set()
    stage.store.close()


def test_a_failed_copy_raises_where_its_bytes_are_needed(stage: Stage) -> None:
    stage.device.fails = True
    handle = stage.store.put(some_bytes(100))
    with pytest.raises(RuntimeError, match="the link is down"):
        stage.store.get(handle)


class Watch:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.name = "nobody"
        self.moves: list[tuple[object, int, bool]] = []
        self.waits: list[tuple[float, float]] = []

    def owner(self) -> object:
        return self.name

    def moved(self, owner: object, start_s: float, end_s: float, nbytes: int, *, is_out: bool) -> None:
        assert start_s <= end_s
        self.moves.append((owner, nbytes, is_out))

    def waited(self, start_s: float, end_s: float) -> None:
        assert start_s <= end_s
        self.waits.append((start_s, end_s))


def test_a_watch_is_told_of_every_move() -> None:
    watch = Watch()
    stage = Stage(max_leaving_nbytes=200, watch=watch)
    watch.name = "first"
    first = stage.store.put(some_bytes(60))
    watch.name = "second"
    second = stage.store.put(some_bytes(70))
    stage.store.prefetch(second)
    stage.store.drop(first)
    stage.store.close()
    stage.store.get(second)
    assert watch.moves == [("first", 60, True), ("second", 70, True), ("second", 70, False)]
    assert watch.waits == []  # what was asked for was there


def test_a_watch_is_told_of_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    stage = Stage(max_leaving_nbytes=100, watch=watch)

    def open_first(wait: Any) -> Any:
        """The copies go on when this thread begins to wait for them."""

        def opened(*args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                stage.device.gate.set()
            return wait(*args)

        return opened

    monkeypatch.setattr(stage.store._changed, "wait_for", open_first(stage.store._changed.wait_for))
    monkeypatch.setattr(Future, "result", open_first(Future.result))
    stage.device.gate.clear()
    first = stage.store.put(some_bytes(60))
    assert watch.waits == []
    second = stage.store.put(some_bytes(70))
    assert len(watch.waits) == 1  # for the first to leave
    stage.store.drop(first)
    stage.device.gate.clear()
    third = stage.store.put(some_bytes(20))
    stage.store.get(third)
    assert len(watch.waits) == 2
    stage.store.drop(second)
    stage.store.close()


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
    stage.store.close()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    counts = stage.store.counts
    assert counts.out_nbytes >= counts.in_nbytes > 0
    assert counts.peak_held_nbytes <= stage.slots.statistics.high_water_nbytes
    assert stage.in_use_nbytes() == counts.held_nbytes == 0
