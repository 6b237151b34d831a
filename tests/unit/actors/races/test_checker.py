"""The race checker itself: each kind of mistake is reported, and code without a mistake is not."""

import functools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

from tests.support.races.checker import Kind, Report
from tests.support.races.cuda import DEVICE
from tests.support.races.run import Recording, recorded
from windlass.engine.activations.host_store import HostActivations
from windlass.engine.device.device import Device, copy
from windlass.engine.model.streaming.params import PieceBuffers, StreamedParams
from windlass.engine.optimizer.adam_formulas import AdamSettings
from windlass.engine.optimizer.adam_kernel import ChunkStates, OptimizerKernel
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import BlockIndex, Kernel, StatePrecision
from windlass.storage.memory.arena import SlotPool

NUMEL = 1024
NBYTES = 4 * NUMEL
DEADLINE_S = 20.0

pytestmark = pytest.mark.usefixtures("one_thread")


class Stage:
    """A device with a buffer, and host memory of two slots."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.host = torch.zeros(2 * NUMEL)
        recording.memory.add_arena(self.host, "stage")
        self.token = CancelToken(DEADLINE_S)
        self.slots = SlotPool(0, NBYTES, 2, name="stage", token=self.token)
        self.device = Device(DEVICE, token=self.token)
        self.buffer = torch.empty(NUMEL, device=DEVICE)
        self.device.h2d.wait(self.device.compute.record())
        self.device.d2h.wait(self.device.compute.record())

    def copy_in(self, slot: int = 0) -> None:
        """Queues a copy to the device."""
        source = self.host[slot * NUMEL :][:NUMEL]
        self.device.h2d.run(lambda: copy(self.buffer, source))

    def copy_out(self, slot: int = 0) -> None:
        """Queues a copy to the host."""
        target = self.host[slot * NUMEL :][:NUMEL]
        self.device.d2h.run(lambda: copy(target, self.buffer))

    def compute(self) -> None:
        """Queues work that reads and writes the buffer."""
        self.device.compute.run(lambda: self.buffer.add_(1))

    @property
    def reports(self) -> list[Report]:
        """All reports so far."""
        return self.recording.checker.finish()

    @property
    def kinds(self) -> list[Kind]:
        """Their kinds."""
        return [report.kind for report in self.reports]


@pytest.fixture
def stage() -> Iterator[Stage]:
    with recorded() as recording:
        stage = Stage(recording)
        yield stage
        stage.token.cancel()


def test_a_stream_that_waits_is_not_reported(stage: Stage) -> None:
    stage.copy_in()
    stage.device.compute.wait(stage.device.h2d.record())
    stage.compute()
    stage.device.d2h.wait(stage.device.compute.record())
    stage.copy_out(1)
    stage.device.d2h.record().wait()
    stage.host.sum()
    assert stage.reports == []


def test_a_stream_that_does_not_wait_is_reported_with_both_places(stage: Stage) -> None:
    stage.copy_in()
    stage.device.h2d.record()
    stage.compute()
    (report,) = stage.reports
    assert report.kind is Kind.RACE
    assert "compute" in report.later
    assert "h2d" in report.earlier
    assert f"bytes 0 to {NBYTES}" in report.where
    assert "the event recorded at" in report.hint


def test_an_event_orders_only_what_was_queued_before_it(stage: Stage) -> None:
    event = stage.device.h2d.record()
    stage.copy_in()
    stage.device.compute.wait(event)
    stage.compute()
    assert stage.kinds == [Kind.RACE]


def test_ranges_that_do_not_overlap_are_not_reported(stage: Stage) -> None:
    half = NUMEL // 2
    stage.device.h2d.run(lambda: copy(stage.buffer[:half], stage.host[:half]))
    stage.device.compute.run(lambda: stage.buffer[half:].zero_())
    assert stage.reports == []
    stage.device.compute.run(lambda: stage.buffer[half - 1 :].zero_())
    assert stage.kinds == [Kind.RACE]


def test_a_host_read_before_the_event_is_reported(stage: Stage) -> None:
    stage.device.compute.record().wait()
    stage.copy_out()
    event = stage.device.d2h.record()
    assert not event.is_over()
    stage.host.tolist()
    assert stage.kinds == [Kind.HOST_READ]


def test_downloaded_numbers_are_read_only_after_their_event(stage: Stage) -> None:
    found: list[torch.Tensor] = []
    stage.device.compute.run(lambda: found.append(stage.device.download([stage.buffer.sum()])))
    event = stage.device.compute.record()
    assert len(found[0].tolist()) == 1
    assert stage.kinds == [Kind.HOST_READ]
    event.wait()
    stage.recording.checker.reports.clear()
    found[0].tolist()
    assert stage.reports == []


def test_a_slot_released_before_its_copy_has_ended_is_reported(stage: Stage) -> None:
    (slot,) = stage.slots.acquire(1)
    stage.copy_in()
    stage.slots.release([slot])
    assert stage.kinds == [Kind.EARLY_RELEASE]


def test_a_slot_released_by_a_callback_is_not_reported(stage: Stage) -> None:
    for _ in range(3):
        spans = stage.slots.acquire(2)
        stage.host.zero_()
        stage.copy_in()
        stage.device.h2d.then(functools.partial(stage.slots.release, spans))
    stage.slots.drain()
    assert stage.reports == []


def test_use_of_a_released_slot_is_reported(stage: Stage) -> None:
    stage.slots.drain()
    stage.host[:NUMEL].zero_()
    assert stage.kinds == [Kind.RELEASED_SLOT]


def put(stage: Stage, *, hold: Callable[[torch.Tensor], object]) -> None:
    """Copies a new tensor out; `hold` gets the tensor, which the caller then forgets."""
    tensors = [torch.ones(NUMEL, device=DEVICE)]
    stage.device.d2h.wait(stage.device.compute.record())
    target = stage.host[:NUMEL]
    stage.device.d2h.run(lambda: copy(target, tensors[0]))
    hold(tensors[0])
    tensors.clear()


def test_memory_freed_while_another_stream_may_use_it_is_reported(stage: Stage) -> None:
    put(stage, hold=lambda tensor: None)
    (report,) = stage.reports
    assert report.kind is Kind.USE_AFTER_FREE
    assert "copy by d2h" in report.earlier


def test_memory_that_a_callback_holds_is_not_reported(stage: Stage) -> None:
    called = threading.Event()

    def note(tensor: torch.Tensor) -> None:
        called.set()

    put(stage, hold=lambda tensor: stage.device.d2h.then(functools.partial(note, tensor)))
    assert called.wait(DEADLINE_S)
    assert stage.reports == []


def test_memory_recorded_for_the_stream_is_not_reported(stage: Stage) -> None:
    stream = stage.device.d2h._stream  # type: ignore[attr-defined]
    put(stage, hold=lambda tensor: tensor.record_stream(stream))
    assert stage.reports == []


def test_memory_that_was_just_allocated_is_filled_only_after_the_compute_stream(stage: Stage) -> None:
    fresh = stage.device.empty(NBYTES).view(torch.float32)
    stage.device.h2d.run(lambda: copy(fresh, stage.host[:NUMEL]))
    (report,) = stage.reports
    assert report.kind is Kind.RACE
    assert "the allocation" in report.earlier


def test_time_of_an_event_that_is_not_over_is_reported(stage: Stage) -> None:
    event = stage.device.compute.record()
    event.time_s()
    assert stage.kinds == [Kind.EVENT_TIME]
    event.wait()
    stage.recording.checker.reports.clear()
    event.time_s()
    assert stage.reports == []


def test_a_product_thread_that_waits_outside_of_the_listed_places_is_reported(stage: Stage) -> None:
    stage.device.copy_out(stage.host[:NUMEL], stage.buffer)  # a test may wait
    assert stage.reports == []
    stage.recording.checker.host_waits(_frame_of_product(), "a wait for an event")
    assert stage.kinds == [Kind.HOST_WAIT]


class NoStore(HostActivations):
    """A store without a device."""

    def __init__(self) -> None:
        pass


def _frame_of_product() -> FrameType:
    """Returns the frame of a function of the product."""
    found: list[FrameType] = []

    def look() -> bool:
        found.append(sys._getframe(1))
        return True

    NoStore()._wait_until(look)
    return found[0]


def test_params_changed_while_they_are_installed_are_reported(stage: Stage) -> None:
    class Source:
        def load(self, target: torch.Tensor, start: int) -> None:
            copy(target, stage.host[:NUMEL])

        def loaded(self, *_: object) -> None:
            pass

    buffers = PieceBuffers(stage.device, NUMEL, torch.float32, 1)
    params = StreamedParams(buffers, Source(), (0, NUMEL), stage.host[:0])
    stage.device.compute.run(lambda: buffers.begin(params, BlockIndex(0), goes_backward=False))
    flats: list[torch.Tensor] = []
    stage.device.compute.run(lambda: flats.append(buffers.hold(0, backward=False)))
    stage.device.compute.run(lambda: flats[0].sum())
    assert stage.reports == []
    stage.device.compute.run(lambda: flats[0].zero_())
    assert stage.kinds == [Kind.INSTALLED]
    stage.device.compute.run(lambda: buffers.release(0))
    stage.device.compute.run(lambda: flats[0].zero_())
    assert stage.kinds == [Kind.INSTALLED]


def test_a_slot_released_before_its_transfer_has_ended_is_reported(stage: Stage) -> None:
    """The work of an I/O scheduler's `on_done` comes after the transfer; that of the request's caller may not."""
    checker, region = stage.recording.checker, stage.recording.checker.arena
    assert region is not None
    first, second = stage.slots.acquire(2)
    agents = [checker.begin_transfer("a read") for _ in range(2)]
    for agent, slot in zip(agents, (first, second), strict=True):
        checker.access(agent, "a read", [], [(region, slot.offset, slot.offset + slot.nbytes)])
    with checker.acting_as(agents[0]):
        stage.slots.release([first])
    assert stage.reports == []
    stage.slots.release([second])
    assert stage.kinds == [Kind.EARLY_RELEASE]


def test_an_update_reads_the_gradient_and_writes_the_states(stage: Stage) -> None:
    settings = AdamSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, decoupled=True)
    kernel = OptimizerKernel(
        settings,
        grad_dtype=torch.float32,
        param_dtype=None,
        state_precision=StatePrecision.FP32,
        kernel=Kernel.FUSED,
    )
    states = [torch.zeros(NUMEL) for _ in range(3)]
    chunk = ChunkStates(grad=stage.host[:NUMEL], master=states[0], exp_avg=states[1], exp_avg_sq=states[2])
    stage.copy_in()  # reads the gradient's slot, as the update does
    kernel.update(chunk, learning_rate=1.0, step=1, grad_scale=1.0, decay_numel=0)
    assert stage.reports == []
    stage.device.d2h.wait(stage.device.h2d.record())
    stage.copy_out()
    kernel.update(chunk, learning_rate=1.0, step=2, grad_scale=1.0, decay_numel=0)
    assert stage.kinds == [Kind.HOST_READ]


# --- threads of the host ----------------------------------------------------------------------------------------------


def test_threads_that_hand_on_nothing_are_reported(stage: Stage) -> None:
    thread = threading.Thread(target=lambda: stage.host.zero_())
    thread.start()
    while thread.is_alive():  # tells the caller nothing that the checker follows
        time.sleep(0.001)
    stage.host.add_(1)
    assert stage.kinds == [Kind.RACE]


@pytest.mark.parametrize("way", ["join", "queue", "simple queue", "event", "condition", "semaphore", "lock"])
def test_threads_that_wait_for_each_other_are_not_reported(stage: Stage, way: str) -> None:
    items: queue.Queue[int] = queue.Queue()
    simple: queue.SimpleQueue[int] = queue.SimpleQueue()
    event, condition, semaphore, lock = (
        threading.Event(),
        threading.Condition(),
        threading.Semaphore(0),
        threading.Lock(),
    )
    done: list[bool] = []

    def work() -> None:
        stage.host.zero_()
        items.put(1)
        simple.put(1)
        event.set()
        semaphore.release()
        with condition:
            done.append(True)
            condition.notify_all()
        with lock:
            done.append(True)

    def is_done() -> bool:
        with lock:
            return len(done) == 2

    def spin() -> None:
        while not is_done():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    ways: dict[str, Callable[[], object]] = {
        "join": thread.join,
        "queue": items.get,
        "simple queue": simple.get,
        "event": lambda: event.wait(DEADLINE_S),
        "semaphore": lambda: semaphore.acquire(timeout=DEADLINE_S),
        "lock": spin,
    }
    if way == "condition":
        with condition:
            assert condition.wait_for(lambda: done, DEADLINE_S)
    else:
        ways[way]()
    stage.host.add_(1)
    assert stage.reports == []
    thread.join()


def test_a_lock_does_not_order_a_streams_work(stage: Stage) -> None:
    """A thread that has waited for a copy tells another one so through a queue, but not by using the same lock."""
    lock, items = threading.Lock(), queue.Queue[int]()
    has_released = torch.zeros(1)  # no primitive that a thread waits for

    def work() -> None:
        stage.device.d2h.record().wait()
        with lock:
            has_released.fill_(1)
        items.put(1)

    stage.copy_out()
    thread = threading.Thread(target=work)
    thread.start()
    while not has_released.numpy().any():
        pass
    with lock:
        pass
    stage.host.sum()
    assert Kind.HOST_READ in stage.kinds
    items.get()
    stage.recording.checker.reports.clear()
    stage.host.sum()
    assert stage.reports == []
    thread.join()
