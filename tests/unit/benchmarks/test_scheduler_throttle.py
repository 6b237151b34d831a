"""What is throttled: real bytes, reported when they are due, one after the other."""

import time
from pathlib import Path

import pytest

from benchmarks import throttle as module
from benchmarks.throttle import Gate, Throttle, ThrottledEngine
from benchmarks.windlass_runner import ordering_of, throttle_of
from tests.training import has_direct_io, losses_of, make_partition, make_spec, metrics_of
from windlass.actors import cpu_optimizer, ssd_server
from windlass.actors.local import run_local
from windlass.actors.policy.ordering import Ordering, QueueOrder
from windlass.storage.transfers import Transfer


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
    """Nothing sleeps; when it would have woken up."""
    found: list[float] = []
    monkeypatch.setattr(module, "sleep_until", found.append)
    return found


def test_amounts_pass_one_after_the_other_and_rest_is_not_saved_up() -> None:
    now_s = 100.0
    gate = Gate(10.0, clock=lambda: now_s)
    assert [gate.due_s(20), gate.due_s(5)] == [102.0, 102.5]
    now_s = 200.0
    assert gate.due_s(10) == 201.0


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


def test_what_is_not_due_in_time_is_not_reported(slept_until: list[float]) -> None:
    engine = ThrottledEngine(StandIn(), Gate(1.0, clock=lambda: time.monotonic() + 1e6))
    engine.submit(transfer(20))
    assert engine.wait(0.5) == []
    assert engine.num_in_flight == 1
    assert engine.wait(None) != []


def test_a_throttled_job_moves_all_its_bytes_and_learns_the_same(
    tmp_path: Path, slept_until: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_spec(tmp_path / "plain", total_steps=3, num_validation_examples=0, evaluate_every=None)
    slow = make_spec(tmp_path / "slow", total_steps=3, num_validation_examples=0, evaluate_every=None)
    run_local(plain, partition=make_partition(plain), direct=has_direct_io(tmp_path))
    passed: dict[float, float] = {}

    class CountingGate(Gate):
        def due_s(self, amount: float) -> float:
            passed[self._rate_per_s] = passed.get(self._rate_per_s, 0) + amount
            return super().due_s(amount)

    monkeypatch.setattr(module, "Gate", CountingGate)
    # For the test's end: what is replaced below is put back.
    monkeypatch.setattr(ssd_server, "open_engine", ssd_server.open_engine)
    monkeypatch.setattr(cpu_optimizer, "ChunkUpdater", cpu_optimizer.ChunkUpdater)
    throttle = Throttle(ssd_bytes_per_s=1e6, optimizer_params_per_s=1e3)
    throttle.slow_ssd_server()
    throttle.slow_optimizer()
    outcome = run_local(slow, partition=make_partition(slow), direct=has_direct_io(tmp_path))
    assert outcome["status"] == "succeeded"
    assert losses_of(slow) == losses_of(plain)
    assert passed[1e3] == 3 * make_partition(slow).layout.numel
    moved = metrics_of(slow, "ssd_bytes_read")[3] + metrics_of(slow, "ssd_bytes_written")[3]
    assert passed[1e6] >= moved > 0
    assert len(slept_until) > 3 * 2


def test_without_rates_nothing_is_replaced() -> None:
    opens, updater = ssd_server.open_engine, cpu_optimizer.ChunkUpdater
    Throttle().slow_ssd_server()
    Throttle().slow_optimizer()
    assert (ssd_server.open_engine, cpu_optimizer.ChunkUpdater) == (opens, updater)


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
