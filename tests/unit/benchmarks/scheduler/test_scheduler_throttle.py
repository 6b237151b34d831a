"""Throttled resources: real bytes, reported when they are due, one transfer after the other."""

import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.peers.windlass_runner import ordering_of, throttle_of
from benchmarks.scheduler import throttle as module
from benchmarks.scheduler.throttle import BACKWARD_FLOP, FORWARD_FLOP, HEAD_FLOP, Gate, Throttle, ThrottledEngine
from tests.support.training import has_direct_io, losses_of, make_partition, make_spec, metrics_of
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.messages import Message, SpanKind, SpansReported, WorkSpan
from windlass.actors.optimizer import worker as cpu_optimizer
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.ssd import server as ssd_server
from windlass.actors.worker_policy.block_queue import Ordering, QueueOrder
from windlass.engine.data.dataset import PreparedDataset
from windlass.storage.ids import ActorName, BlockIndex, ChunkIndex, ChunkKey
from windlass.storage.io.engines import Transfer
from windlass.storage.io_scheduler import scheduler as io_scheduler

OPERATIONS = (SpanKind.FORWARD, SpanKind.HEAD, SpanKind.BACKWARD)


class StandIn:
    """An engine whose transfers move at once."""

    depth = 2

    def __init__(self) -> None:
        self.submitted: list[Transfer] = []
        self.is_closed = False

    @property
    def num_in_flight(self) -> int:
        return len(self.submitted)

    def submit(self, transfer: Transfer) -> None:
        self.submitted.append(transfer)

    def wait(self, timeout_s: float | None) -> list[Transfer]:
        moved, self.submitted = self.submitted, []
        return moved

    def close(self) -> None:
        self.is_closed = True


def transfer(nbytes: int) -> Transfer:
    return Transfer(is_read=True, offset=0, buffer=memoryview(bytearray(nbytes)), tag=None)


@pytest.fixture
def slept_until(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces sleeping, and records the times until which a task would have slept."""
    found: list[float] = []
    monkeypatch.setattr(module, "sleep_until", found.append)
    return found


def test_amounts_pass_one_after_the_other_and_rest_is_not_saved_up() -> None:
    now_s = 100.0
    gate = Gate(10.0, clock=lambda: now_s)
    assert [gate.due_s(20), gate.due_s(5)] == [102.0, 102.5]
    now_s = 200.0
    assert gate.due_s(10) == 201.0


def test_oversleeping_delays_the_next_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    gate = Gate(10.0, clock=lambda: now_s)

    def oversleep(at_s: float) -> None:
        nonlocal now_s
        now_s = at_s + 0.5

    monkeypatch.setattr(module, "sleep_until", oversleep)
    with gate.passing(20):
        now_s = 101.0
    assert now_s == 102.5
    with gate.passing(20):
        assert now_s == 102.5
    assert now_s == 104.5
    with gate.passing(10, came_at_s=104.25):  # the transfer before it was late by itself
        now_s = 110.0
    # A task that did not sleep did not oversleep.
    assert now_s == gate.due_s(0) == 110.0


def test_transfers_are_reported_when_they_are_due(slept_until: list[float]) -> None:
    inner = StandIn()
    engine = ThrottledEngine(inner, Gate(10.0, clock=lambda: 100.0))
    first, second = transfer(20), transfer(5)
    engine.submit(first)
    engine.submit(second)
    with pytest.raises(ValueError, match="2 transfers are in flight"):
        engine.submit(transfer(1))
    assert engine.wait(None) == [first]
    assert engine.num_in_flight == 1
    assert engine.wait(None) == [second]
    assert slept_until == [102.0, 102.5]
    assert engine.num_in_flight == 0
    engine.close()
    assert inner.is_closed


def test_transfer_not_due_in_time_is_not_reported(slept_until: list[float]) -> None:
    engine = ThrottledEngine(StandIn(), Gate(1.0, clock=lambda: time.monotonic() + 1e6))
    engine.submit(transfer(20))
    assert engine.wait(0.5) == []
    assert engine.num_in_flight == 1
    assert engine.wait(None) != []


RATES = Throttle(ssd_bytes_per_s=1e6, optimizer_params_per_s=1e3, compute_flop_per_s=1e9)


def test_a_throttled_job_moves_all_its_bytes_and_learns_the_same(
    tmp_path: Path, slept_until: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"total_steps": 3, "num_validation_examples": 0, "evaluate_every": None, "num_ssds": 1}
    plain, slow = make_spec(tmp_path / "plain", **changes), make_spec(tmp_path / "slow", **changes)
    direct = has_direct_io(tmp_path)
    run_local(plain, partition=make_partition(plain), direct=direct)
    passed: Counter[float] = Counter()

    class CountingGate(Gate):
        def due_s(self, amount: float, **options: Any) -> float:
            passed[self._rate_per_s] += amount
            return super().due_s(amount, **options)

    monkeypatch.setattr(module, "Gate", CountingGate)
    spans: list[WorkSpan] = []

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, SpansReported):
            spans.extend(message.spans)

    partition = make_partition(slow)
    with RATES.holding_back():
        outcome = run_local(slow, partition=partition, direct=direct, on_message=look)
    assert outcome["status"] == "succeeded"
    assert losses_of(slow) == losses_of(plain)
    layout = partition.layout
    assert passed[1e3] == 3 * layout.numel
    moved = metrics_of(slow, "ssd_bytes_read")[3] + metrics_of(slow, "ssd_bytes_written")[3]
    assert passed[1e6] >= moved > 0
    num_tokens = sum(
        microbatch.input_ids.numel()
        for step in range(3)
        for microbatch in PreparedDataset.open(slow.dataset_dir, "train").batch(step, 4, 1, slow.training.seed)
    )
    *layers, head = (block.numel for block in layout.blocks)
    assert passed[1e9] == num_tokens * ((FORWARD_FLOP + BACKWARD_FLOP) * sum(layers) + HEAD_FLOP * head)
    assert len(slept_until) > 3 * 2
    # The reported time: amount over rate, regardless of the real one.
    for span in spans:
        seconds = span.end_s - span.start_s
        if span.kind is SpanKind.UPDATE:
            start, stop = layout.chunk_range(ChunkKey(BlockIndex(span.block), ChunkIndex(span.chunk)))
            assert seconds == pytest.approx((stop - start) / 1e3)
        elif span.resource == "ssd-0" and span.nbytes:
            assert seconds == pytest.approx(span.nbytes / 1e6)
    told = sum(span.end_s - span.start_s for span in spans if span.kind in OPERATIONS)
    assert told == pytest.approx(passed[1e9] / 1e9)


def test_throttle_restores_replaced_names() -> None:
    def found() -> list[Any]:
        modules = (io_scheduler, ssd_server, cpu_optimizer, gpu_worker)
        names = ("open_engine", "ChunkUpdater", "BlockRunner", "SpanRecorder")
        return [vars(module)[name] for module in modules for name in names if name in vars(module)]

    before = found()
    with RATES.holding_back():
        assert all(mine is not theirs for mine, theirs in zip(found(), before, strict=True))
    assert found() == before
    with Throttle().holding_back():
        assert found() == before


@pytest.mark.parametrize(
    ("name", "module", "attribute"),
    [("ssd-1", io_scheduler, "open_engine"), ("optimizer-0", cpu_optimizer, "ChunkUpdater")],
)
def test_actor_in_separate_process_is_throttled_until_its_end(
    name: str, module: ModuleType, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner in (io_scheduler, ssd_server, cpu_optimizer):
        for each in {"SpanRecorder", attribute} & vars(owner).keys():
            monkeypatch.setattr(owner, each, vars(owner)[each])  # restored at the end
    before, runner = vars(module)[attribute], gpu_worker.BlockRunner
    Throttle(compute_flop_per_s=1.0).slow_actor(name)
    assert vars(module)[attribute] is before
    RATES.slow_actor(name)
    assert vars(module)[attribute] is not before
    assert gpu_worker.BlockRunner is runner


def test_a_jobs_processes_read_their_rates_from_its_folder(tmp_path: Path) -> None:
    throttle = throttle_of(["ssd_bytes_per_s=2e8"])
    assert throttle == Throttle(ssd_bytes_per_s=2e8)
    throttle.write(tmp_path)
    assert Throttle.read(tmp_path) == throttle


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer_params_per_s is 0.0; a rate is above 0"):
        throttle_of(["optimizer_params_per_s=0"])


def test_orderings_are_told_on_the_command_line() -> None:
    assert ordering_of([]) == Ordering()
    told = ordering_of(["queues=fifo", "overlaps_steps=0", "max_updating=7"])
    assert told == Ordering(queues=QueueOrder.FIFO, overlaps_steps=False, max_updating=7)
