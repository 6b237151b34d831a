"""Chunks of urgent blocks overtake others until they begin, and only chunks that need a slot wait for one."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from windlass.actors.optimizer.chunk_pipeline import ChunkPipeline
from windlass.actors.worker_policy import QueueOrder
from windlass.engine.device import compute_on_cpu, openmp
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import BlockIndex, Span, Step
from windlass.storage.memory import SlotPool

RESIDENT = Span(1 << 20, 4096)
DEADLINE_S = 20.0


class FakeIo:
    """Notes all calls. Items are names; those that begin with "resident" have their states in memory."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.arrivals: dict[str, Callable[[], None]] = {}
        self.writes: dict[str, Callable[[], None]] = {}
        self.changed = threading.Condition()

    def note(self, call: str) -> None:
        with self.changed:
            self.calls.append(call)
            self.changed.notify_all()

    def wait_for(self, call: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: call in self.calls, DEADLINE_S), self.calls

    def works_at(self, item: str) -> None:
        pass

    def resident_slot(self, item: str) -> Span | None:
        return RESIDENT if item.startswith("resident") else None

    def read_states(self, item: str, slot: Span, on_done: Callable[[], None]) -> None:
        self.arrivals[item] = on_done
        self.note(f"read {item}")

    def update_chunk(self, item: str, slot: Span) -> None:
        assert (slot == RESIDENT) == item.startswith("resident")
        self.note(f"update {item}")

    def write_states(self, item: str, slot: Span, on_done: Callable[[], None]) -> None:
        self.writes[item] = on_done
        self.note(f"write {item}")

    def block_updated(self, step: Step, block: BlockIndex) -> None:
        self.note(f"block {block} of step {step}")


class Bench:
    def __init__(self, num_slots: int, *, deadline_s: float = DEADLINE_S) -> None:
        self.io = FakeIo()
        self.token = CancelToken(deadline_s)
        self.slots = SlotPool(0, 4096, num_slots, token=self.token)
        self.pipeline: ChunkPipeline[str] = ChunkPipeline(
            self.io, self.slots, QueueOrder.PRIORITY, self.token, num_threads=1
        )
        self.threads = [threading.Thread(target=self._run, args=(loop,), daemon=True) for loop in self.pipeline.loops]

    def begin(self, block: int, *items: str) -> None:
        self.pipeline.begin(Step(1), BlockIndex(block), items)

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def _run(self, loop: Callable[[], None]) -> None:
        with contextlib.suppress(InterruptedError):  # raised after `stop`
            loop()

    def stop(self) -> None:
        self.token.cancel()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in self.threads)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(num_slots=1)
    yield bench
    bench.stop()


def test_pipeline_reads_updates_writes_and_reports_block_after_last_write(bench: Bench) -> None:
    bench.begin(3, "a", "b")
    bench.start()
    for item in "ab":
        bench.io.wait_for(f"read {item}")
        bench.io.arrivals[item]()
        bench.io.wait_for(f"write {item}")
        assert "block 3 of step 1" not in bench.io.calls
        bench.io.writes[item]()  # releases the only slot
    assert bench.io.calls == ["read a", "update a", "write a", "read b", "update b", "write b", "block 3 of step 1"]


def test_resident_chunk_needs_no_slot(bench: Bench) -> None:
    (slot,) = bench.slots.acquire(1)
    bench.begin(0, "resident")
    bench.start()
    bench.io.wait_for("block 0 of step 1")
    assert bench.io.calls == ["update resident", "block 0 of step 1"]
    bench.slots.release([slot])


def test_pipeline_without_slots_updates_resident_chunks() -> None:
    bench = Bench(num_slots=0)
    bench.begin(0, "resident 1", "resident 2")
    bench.start()
    bench.io.wait_for("block 0 of step 1")
    bench.stop()


@pytest.mark.parametrize("urgent", ["urgent", "resident and urgent"])
def test_chunk_of_urgent_block_overtakes_during_wait_for_slot(bench: Bench, urgent: str) -> None:
    (slot,) = bench.slots.acquire(1)
    waits = threading.Event()
    acquire = bench.slots.acquire

    def noted(num: int) -> list[Span]:
        waits.set()
        return acquire(num)

    bench.slots.acquire = noted  # type: ignore[method-assign]
    bench.begin(5, "late")
    bench.start()
    assert waits.wait(DEADLINE_S)
    bench.begin(2, urgent)
    bench.slots.release([slot])
    bench.io.wait_for("read urgent" if urgent == "urgent" else "block 2 of step 1")
    if urgent == "urgent":
        assert "read late" not in bench.io.calls
    else:  # the slot is for the other chunk
        bench.io.wait_for("read late")


def test_resident_chunk_does_not_wait_for_one_that_waits_for_a_slot(bench: Bench) -> None:
    (slot,) = bench.slots.acquire(1)
    bench.begin(0, "late")
    bench.start()
    bench.begin(1, "resident")
    bench.io.wait_for("block 1 of step 1")
    assert bench.io.calls == ["update resident", "block 1 of step 1"]
    bench.slots.release([slot])
    bench.io.wait_for("read late")


def test_call_goes_before_chunks_that_were_not_read(bench: Bench) -> None:
    bench.begin(0, "a")
    bench.pipeline.call(lambda: bench.io.note("call"))
    bench.start()
    bench.io.wait_for("read a")
    assert bench.io.calls == ["call", "read a"]


def test_chunks_are_read_into_all_slots_while_none_is_updated() -> None:
    bench = Bench(num_slots=3)
    bench.begin(0, "a", "b", "c", "d")
    bench.threads[0].start()
    for item in "abc":
        bench.io.wait_for(f"read {item}")
        bench.io.arrivals[item]()
    time.sleep(0.05)
    assert "read d" not in bench.io.calls
    bench.threads[1].start()
    bench.io.wait_for("write a")
    bench.io.writes["a"]()
    bench.io.wait_for("read d")
    bench.stop()


def test_cancel_ends_the_wait_for_a_slot(bench: Bench) -> None:
    bench.begin(0, "a", "b")
    bench.threads[0].start()
    bench.io.wait_for("read a")
    time.sleep(0.05)  # lets the wait begin
    bench.token.cancel()
    bench.threads[0].join(DEADLINE_S)
    assert not bench.threads[0].is_alive()


def test_optimizer_that_hangs_is_an_error() -> None:
    bench = Bench(num_slots=1, deadline_s=0.05)
    bench.begin(0, "a", "b")
    bench.io.read_states = lambda item, slot, on_done: on_done()  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for 1 slots of .* their holders are stuck or slow"):
        bench.pipeline.loops[0]()
    bench.stop()


@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="torch computes without OpenMP")
def test_no_thread_of_an_update_is_left_to_share_the_cores_with_the_one_that_computes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more threads of OpenMP than cores in a process, those that compute sleep at each end of a region."""
    nums = dict.fromkeys(("before", "in the update", "after"), 0)

    def update(item: str, slot: Span) -> None:
        nums["before"] = len(list(Path("/proc/self/task").iterdir()))
        torch.set_num_threads(3)
        torch.ones(1 << 20).add_(1)
        nums["in the update"] = len(list(Path("/proc/self/task").iterdir()))

    def updated(step: Step, block: BlockIndex) -> None:
        nums["after"] = len(list(Path("/proc/self/task").iterdir()))
        bench.io.note("over")

    num_threads = torch.get_num_threads()
    monkeypatch.setattr(bench.io, "update_chunk", update)
    monkeypatch.setattr(bench.io, "block_updated", updated)
    monkeypatch.setattr(openmp, "_computing", threading.Event())
    compute_on_cpu()
    try:
        bench.begin(0, "resident")
        bench.start()
        bench.io.wait_for("over")
    finally:
        torch.set_num_threads(num_threads)
    assert nums["in the update"] == nums["before"] + 2
    assert nums["after"] == nums["before"]
