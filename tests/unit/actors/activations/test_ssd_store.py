"""The use of staging buffers by swapped activations, step by step: the SSDs answer when the test says so."""

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actors.swap_bench import SLOT_NBYTES, WAIT_S, WORKER, PoisonedSlots, make_swap_context, some_bytes
from windlass.actors.activations import ssd_store as ssd_activations
from windlass.actors.activations.parts import Moment, SsdSwap
from windlass.actors.activations.ssd_store import SsdActivations
from windlass.actors.messages import ActivationIoDone, Message, ReadActivations, WriteActivations
from windlass.actors.ssd.client import SsdClient
from windlass.engine.activations.host_store import ActivationMemoryError
from windlass.engine.activations.store import Unwatched
from windlass.engine.device.device import Device, copy
from windlass.engine.device.streams import StartThreads
from windlass.engine.device.tensor_arena import TensorArena
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ActorName, BlockIndex, Step
from windlass.storage.threads import CancellableThreads

Request = WriteActivations | ReadActivations


class GatedDevice(Device):
    """A device whose activations wait for a gate before each copy."""

    def __init__(self, token: CancelToken, start_threads: StartThreads) -> None:
        super().__init__(torch.device("cpu"), token=token, start_threads=start_threads)
        self.gate = threading.Event()
        self.gate.set()
        self.failing = False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.gate.wait(WAIT_S)
        if self.failing:
            raise RuntimeError("the link is down")
        copy(target, source)


class Stage:
    """The store, and SSDs in memory that move bytes and answer one request at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, max_leaving_nbytes: int = 1 << 30, **facts: Any) -> None:
        self.context = make_swap_context(Path("/nowhere"), **({"num_host": 3, "num_staged": 1, "num_ssd": 8} | facts))
        self.token = CancelToken(self.context.spec.deadline_s)
        self.errors: list[Exception] = []
        self.threads = CancellableThreads(WORKER, "job", self.token, self._end, deadline_s=WAIT_S)
        self.device = GatedDevice(self.token, self.threads.start)
        monkeypatch.setattr(ssd_activations, "copy", self.device.copy)
        self.memory = torch.full((self.context.plan.activations.nbytes,), 0xFF, dtype=torch.uint8)
        self.on_ssds: dict[tuple[ActorName, int], torch.Tensor] = {}
        self.asked: list[tuple[ActorName, Request]] = []
        self.changed = threading.Condition()
        self.client = SsdClient(WORKER, self.context, self._send)
        with monkeypatch.context() as patch:
            patch.setattr(ssd_activations, "SlotPool", self._make_pool)
            self.store = SsdActivations(
                self.context,
                0,
                self.device,
                TensorArena(self.memory),
                self.client,
                Unwatched(),
                max_leaving_nbytes=max_leaving_nbytes,
            )

    def _end(self, error: Exception, at: object) -> None:
        self.errors.append(error)
        self.token.cancel()

    def _make_pool(self, *args: Any, **kwargs: Any) -> PoisonedSlots:
        self.pool = PoisonedSlots(*args, **kwargs)
        self.pool.memory = self.memory
        return self.pool

    def _send(self, to: ActorName, message: Message) -> None:
        assert isinstance(message, Request)
        with self.changed:
            self.asked.append((to, message))
            self.changed.notify_all()

    def next(self) -> Request:
        """The oldest unanswered request to the SSDs."""
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.asked), WAIT_S), "nothing was asked"
            return self.asked[0][1]

    def is_quiet(self) -> bool:
        """Returns whether no request is unanswered."""
        with self.changed:
            return not self.changed.wait_for(lambda: bool(self.asked), 0.05)

    def answer(self) -> Request:
        """Executes and answers the oldest request, and returns it."""
        request = self.next()
        to, _ = self.asked.pop(0)
        span = self.memory[request.span.offset : request.span.offset + request.span.nbytes]
        for i, slot in enumerate(request.slots):
            part = span[i * SLOT_NBYTES : (i + 1) * SLOT_NBYTES]
            if isinstance(request, WriteActivations):
                self.on_ssds[to, slot] = part.clone()
            else:
                part.copy_(self.on_ssds.pop((to, slot)))
        self.client.take(ActivationIoDone(job=request.job, step=request.step, correlation=request.correlation))
        return request

    def put(self, seed: int, nbytes: int = SLOT_NBYTES) -> SsdSwap:
        """Puts an activation whose block index is its seed."""
        self.store.begin(Moment(Step(3), BlockIndex(seed)))
        return self.store.put(some_bytes(nbytes, seed))

    def rest(self, seed: int, nbytes: int = SLOT_NBYTES) -> SsdSwap:
        """Puts an activation and waits until it is written."""
        swap = self.put(seed, nbytes)
        for _ in swap.parts:
            assert isinstance(self.answer(), WriteActivations)
        return swap

    def prefetch(self, swap: SsdSwap) -> torch.Tensor:
        target = torch.zeros(swap.nbytes, dtype=torch.uint8)
        self.store.prefetch(swap, target)
        return target

    def in_thread(self, act: Callable[[], object]) -> "Result":
        return Result(act)

    def check_free(self) -> None:
        """Checks that nothing is held, and that all slots of the SSDs can be used."""
        self.store.drop(self.rest(0, self.context.plan.num_ssd_activations * SLOT_NBYTES))
        assert self.pool.statistics.in_use_nbytes == 0
        assert self.store.counts.held_nbytes == 0
        assert bool((self.memory == 0xFF).all())


class Result:
    """The result of a blocking call in a thread of its own."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()

    def _run(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def is_waiting(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(**facts: Any) -> Stage:
        stages.append(Stage(monkeypatch, **facts))
        return stages[-1]

    yield make
    for stage in stages:
        stage.device.gate.set()
        stage.threads.stop()


class TestRequests:
    def test_requests_carry_block_and_priority(self, make: Callable[..., Stage]) -> None:
        stage = make(num_staged=4, num_ssd=9)  # in parts of one slot
        stage.store.begin(Moment(Step(5), BlockIndex(2)))
        swap = stage.store.put(some_bytes(2 * SLOT_NBYTES + 1))
        writes = [stage.answer() for _ in range(3)]
        for write in writes:
            assert isinstance(write, WriteActivations)
            assert (write.job, write.step, write.block, write.reply_to) == ("ftjob-1", 5, 2, WORKER)
            # It is needed again at the next operation; params of step 5 have priorities (4, operation).
            assert write.priority == (4, 10)
            assert write.span.offset >= 3 * SLOT_NBYTES  # beyond the slots that stay in host memory
        assert [write.slots for write in writes] == [(0,), (1,), (2,)]
        assert [write.span.nbytes for write in writes] == [SLOT_NBYTES] * 3
        stage.store.begin(Moment(Step(5), BlockIndex(3)))
        target = stage.prefetch(swap)
        reads = [stage.answer() for _ in range(3)]
        for read, write in zip(reads, writes, strict=True):
            assert isinstance(read, ReadActivations)
            assert (read.priority, read.block, read.slots, read.span.nbytes) == (
                (4, 2**31),
                2,
                write.slots,
                SLOT_NBYTES,
            )
        stage.store.wait_for(swap)
        assert torch.equal(target, some_bytes(2 * SLOT_NBYTES + 1))
        assert len({each.correlation for each in (*writes, *reads)}) == 6
        stage.check_free()

    @pytest.mark.parametrize(
        ("num_staged", "weights", "expected"),
        [(1, (1,), 1), (7, (1,), 1), (8, (1,), 2), (16, (1,), 4), (64, (1,), 4), (16, (1, 1, 1), 2), (16, (1,) * 8, 1)],
    )
    def test_parts_are_as_large_as_buffers_for_all_ssds_allow(
        self, make: Callable[..., Stage], num_staged: int, weights: tuple[int, ...], expected: int
    ) -> None:
        stage = make(num_staged=num_staged, weights=weights, num_ssd=64)
        swap = stage.put(1, 8 * SLOT_NBYTES)
        assert [len(part.slots) for part in swap.parts] == [expected] * (8 // expected)
        assert len(stage.next().slots) == expected
        assert stage.pool.num_slots == num_staged // expected

    def test_a_part_that_is_too_large_for_its_ssd_is_cut(self, make: Callable[..., Stage]) -> None:
        stage = make(num_staged=64, weights=(1, 1), num_ssd=6)  # three on each
        swap = stage.put(1, 6 * SLOT_NBYTES)
        assert [(part.ssd, part.slots) for part in swap.parts] == [(0, (0, 1, 2)), (1, (0, 1, 2))]


class TestTurns:
    """The order of transfers with a single staging buffer."""

    def test_one_part_after_the_other(self, make: Callable[..., Stage]) -> None:
        stage = make()
        swap = stage.put(1, 3 * SLOT_NBYTES)
        for slot in range(3):
            assert stage.next().slots == (slot,)
            assert len(stage.asked) == 1
            stage.answer()
        assert stage.is_quiet()
        target = stage.prefetch(swap)
        for slot in range(3):
            assert stage.answer().slots == (slot,)
        stage.store.wait_for(swap)
        assert torch.equal(target, some_bytes(3 * SLOT_NBYTES, 1))
        stage.check_free()

    def test_read_that_is_waited_for_goes_first(self, make: Callable[..., Stage]) -> None:
        stage = make()
        swaps = [stage.rest(seed) for seed in range(4)]
        targets = [stage.prefetch(swap) for swap in swaps]
        assert stage.next().block == 0  # already in flight
        result = stage.in_thread(lambda: stage.store.wait_for(swaps[2]))
        assert result.is_waiting()
        assert [stage.answer().block for _ in range(4)] == [0, 2, 1, 3]
        result.end()
        for i in (0, 1, 3):
            stage.store.wait_for(swaps[i])
        assert all(torch.equal(target, some_bytes(SLOT_NBYTES, i)) for i, target in enumerate(targets))
        stage.check_free()

    def test_write_goes_before_prefetch(self, make: Callable[..., Stage]) -> None:
        stage = make()
        resting = stage.rest(1)
        stage.put(2)
        stage.next()
        stage.prefetch(resting)
        stage.put(3)
        kinds = [(type(request), request.block) for request in (stage.answer() for _ in range(3))]
        assert kinds == [(WriteActivations, 2), (WriteActivations, 3), (ReadActivations, 1)]
        stage.store.wait_for(resting)

    def test_read_that_is_waited_for_goes_before_write(self, make: Callable[..., Stage]) -> None:
        stage = make()
        resting = stage.rest(1)
        stage.put(2)
        stage.next()
        stage.put(3)
        stage.prefetch(resting)
        result = stage.in_thread(lambda: stage.store.wait_for(resting))
        assert result.is_waiting()
        kinds = [(type(request), request.block) for request in (stage.answer() for _ in range(3))]
        assert kinds == [(WriteActivations, 2), (ReadActivations, 1), (WriteActivations, 3)]
        result.end()

    def test_read_of_unwritten_activation_waits_for_its_write(self, make: Callable[..., Stage]) -> None:
        """The read waits without a buffer, because other transfers need it."""
        stage = make()
        swaps = [stage.put(seed) for seed in range(3)]
        targets = [stage.prefetch(swap) for swap in reversed(swaps)]
        result = stage.in_thread(lambda: stage.store.wait_for(swaps[2]))
        assert result.is_waiting()
        kinds = [(type(request), request.block) for request in (stage.answer() for _ in range(6))]
        assert kinds[:4] == [*((WriteActivations, block) for block in range(3)), (ReadActivations, 2)]
        assert kinds[4:] == [(ReadActivations, 1), (ReadActivations, 0)]
        result.end()
        for swap in swaps[:2]:
            stage.store.wait_for(swap)
        assert all(torch.equal(target, some_bytes(SLOT_NBYTES, 2 - i)) for i, target in enumerate(targets))
        stage.check_free()


class TestDrop:
    def test_drop_of_activation_that_waits_for_its_write(self, make: Callable[..., Stage]) -> None:
        stage = make()
        stage.put(1)
        waiting = stage.put(2, 7 * SLOT_NBYTES)
        stage.store.drop(waiting)
        assert waiting.source is None
        stage.put(3, 7 * SLOT_NBYTES)  # there is space for it at once
        assert stage.answer().block == 1
        assert stage.next().block == 3

    @pytest.mark.parametrize("state", ["copying out", "writing", "resting", "reading", "copying in"])
    def test_drop_of_activation_in_transfer_or_on_ssd(self, make: Callable[..., Stage], state: str) -> None:
        """A buffer that may still be written to is not released."""
        stage = make()
        if state == "copying out":
            stage.device.gate.clear()
        swap = stage.rest(1) if state in ("resting", "reading", "copying in") else stage.put(1)
        if state == "writing":
            stage.next()
        if state in ("reading", "copying in"):
            stage.prefetch(swap)
            stage.next()
        if state == "copying in":
            stage.device.gate.clear()
            stage.answer()
        stage.store.drop(swap)
        assert stage.store.counts.held_nbytes == 0
        is_busy = state != "resting"
        assert (stage.pool.statistics.in_use_nbytes > 0) == is_busy
        put = stage.in_thread(lambda: stage.put(2, 8 * SLOT_NBYTES))  # needs every slot
        assert put.is_waiting() == is_busy
        stage.device.gate.set()
        if state in ("writing", "reading"):
            stage.answer()
        put.end()
        for _ in range(8):
            assert stage.answer().block == 2


class TestBounds:
    def test_bytes_in_flight_to_ssds_are_bounded(self, make: Callable[..., Stage]) -> None:
        stage = make(max_leaving_nbytes=2 * SLOT_NBYTES, num_staged=2)
        stage.device.gate.clear()
        stage.put(1)
        stage.put(2)
        third = stage.in_thread(lambda: stage.put(3))
        assert third.is_waiting()
        stage.device.gate.set()
        third.end()  # two are in buffers, one waits on the device
        fourth = stage.in_thread(lambda: stage.put(4, 3 * SLOT_NBYTES))
        assert fourth.is_waiting()
        stage.answer()
        fourth.end()  # a single activation may be larger than the limit

    def test_tensor_is_freed_once_it_is_written(self, make: Callable[..., Stage]) -> None:
        stage = make(num_staged=2)
        tensor = some_bytes(2 * SLOT_NBYTES)
        reference = weakref.ref(tensor)
        swap = stage.store.put(tensor)
        del tensor
        stage.answer()
        stage.answer()
        assert reference() is None
        target = stage.prefetch(swap)
        stage.answer()
        stage.answer()
        stage.store.wait_for(swap)
        assert torch.equal(target, some_bytes(2 * SLOT_NBYTES))
        assert swap.target is None

    def test_full_space(self, make: Callable[..., Stage]) -> None:
        stage = make()
        stage.rest(1, 6 * SLOT_NBYTES)
        with pytest.raises(ActivationMemoryError, match=r"3 slots of 4.00 KiB .* 6 of 8 are in use; raise ssd_activ"):
            stage.put(2, 3 * SLOT_NBYTES)
        stage.put(2, 2 * SLOT_NBYTES)


class TestFailures:
    @pytest.mark.parametrize("way", ["out", "in"])
    def test_a_failed_copy_ends_its_thread_and_the_waits(self, make: Callable[..., Stage], way: str) -> None:
        stage = make()
        stage.device.failing = way == "out"
        swap = stage.put(1, 3 * SLOT_NBYTES)
        if way == "in":
            for _ in range(3):
                stage.answer()
            stage.device.failing = True
        stage.prefetch(swap)
        if way == "in":
            stage.answer()
        with pytest.raises((InterruptedError, RuntimeError), match=r"the job was stopped|the link is down"):
            stage.store.wait_for(swap)
        assert [str(error) for error in stage.errors] == ["the link is down"]

    def test_read_that_times_out_is_named(self, make: Callable[..., Stage]) -> None:
        stage = make(deadline_s=0.05, weights=(1, 1), num_staged=2)
        swap = stage.rest(4, 3 * SLOT_NBYTES)
        stage.prefetch(swap)
        stage.answer()
        text = (
            r"waited 0.05 s for 8.00 KiB of 12.00 KiB of activations of block 4, step 3 to come back from ssd-0, ssd-1"
        )
        with pytest.raises(TimeoutError, match=text):
            stage.store.wait_for(swap)

    def test_what_each_ssd_server_has_owed_for_longest_is_known(
        self, make: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now_s = 50.0
        monkeypatch.setattr(ssd_activations.time, "monotonic", lambda: now_s)
        stage = make(weights=(1, 1), num_staged=6)
        assert stage.client.describe_pending() == ""
        stage.prefetch(stage.rest(4))
        assert isinstance(stage.next(), ReadActivations)
        now_s = 51.0
        stage.put(5, 2 * SLOT_NBYTES)
        with stage.changed:
            assert stage.changed.wait_for(lambda: len(stage.asked) == 3, WAIT_S)
        now_s = 52.0
        assert stage.client.describe_pending() == (
            "ssd-0 has not finished a read of activations of block 4, step 3 after 2.0 s: check its SSD; "
            "ssd-1 has not finished a write of activations of block 5, step 3 after 1.0 s: check its SSD"
        )
        for _ in range(3):
            stage.answer()
        assert stage.client.describe_pending() == ""

    def test_write_that_times_out_is_named(self, make: Callable[..., Stage]) -> None:
        stage = make(deadline_s=0.05, max_leaving_nbytes=0)
        stage.put(1, 2 * SLOT_NBYTES)
        with pytest.raises(TimeoutError, match=r"4.00 KiB of activations to leave the device"):
            stage.put(2)

    def test_write_of_dropped_activation_that_times_out_is_named(self, make: Callable[..., Stage]) -> None:
        stage = make(deadline_s=0.05)
        swap = stage.put(1, 8 * SLOT_NBYTES)
        stage.next()
        stage.store.drop(swap)
        stage.put(2, 7 * SLOT_NBYTES)
        with pytest.raises(TimeoutError, match=r"waited 0\.05 s for the SSD slots of dropped activations"):
            stage.put(3)


class TestStop:
    def test_stop_wakes_waiting_threads(self, make: Callable[..., Stage]) -> None:
        stage = make(max_leaving_nbytes=0)
        swap = stage.put(1, 2 * SLOT_NBYTES)
        stage.prefetch(swap)
        get, put = stage.in_thread(lambda: stage.store.wait_for(swap)), stage.in_thread(lambda: stage.put(2))
        assert get.is_waiting()
        assert put.is_waiting()
        stage.token.cancel()
        for result in (get, put):
            with pytest.raises(InterruptedError, match="the job was stopped"):
                result.end()

    @pytest.mark.parametrize("state", ["copying out", "writing", "reading", "copying in"])
    def test_stop_sends_no_more_requests_and_accepts_late_answers(self, make: Callable[..., Stage], state: str) -> None:
        stage = make()
        if state == "copying out":
            stage.device.gate.clear()
        swap = stage.rest(1) if state in ("reading", "copying in") else stage.put(1)
        other = stage.put(2) if state in ("copying out", "writing") else None
        if state in ("reading", "copying in"):
            stage.prefetch(swap)
        if state == "copying in":
            stage.device.gate.clear()
            stage.answer()
        elif state != "copying out":
            stage.next()
        stage.token.cancel()
        stage.device.gate.set()
        stage.threads.stop()
        if state in ("writing", "reading"):
            stage.answer()
        assert stage.asked == []
        for each in (swap, other):
            if each is not None:
                stage.store.drop(each)
        assert stage.pool.statistics.in_use_nbytes == stage.store.counts.held_nbytes == 0
