"""One rank on a device whose streams run late, as a GPU's do."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actors.worker_bench import Bench, running
from tests.support.late_streams import LateStreams
from windlass.actors.messages import ComputeBlock, ComputeProgressed, Phase
from windlass.engine.device import device as device_module
from windlass.engine.device.streams import StartThreads, Stream
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.cancellation import CancelToken

WAIT_S = 20.0


class LateBench(Bench):
    """Waits until the device has been given work, which runs once `streams.is_held_up` is not set."""

    streams: LateStreams

    def wait_until_given(
        self, stream: Stream, num_things: int, monkeypatch: pytest.MonkeyPatch, post: Callable[[], None]
    ) -> None:
        """Returns once a stream was given `num_things` tasks whose end is awaited."""
        given, then = threading.Semaphore(0), stream.then

        def counting(callback: Callable[[], None]) -> None:
            then(callback)
            given.release()

        monkeypatch.setattr(stream, "then", counting)
        post()
        for _ in range(num_things):
            assert given.acquire(timeout=WAIT_S)
        monkeypatch.undo()


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateBench]:
    """`request.param`: the order of the device's streams. All params stay in host memory."""
    opened: list[LateStreams] = []

    def open_streams(device: torch.device, token: CancelToken, start_threads: StartThreads) -> LateStreams:
        opened.append(LateStreams(start_threads, token=token, order=request.param))
        return opened[-1]

    bench = LateBench(tmp_path, placement=Placement(num_cached_params=100))
    patch = pytest.MonkeyPatch()
    patch.setattr(device_module, "open_streams", open_streams)
    with running(bench):
        patch.undo()
        (bench.streams,) = opened
        yield bench
        bench.streams.is_held_up = False


@pytest.mark.parametrize("bench", [0], indirect=True)
def test_an_operation_is_given_while_the_one_before_is_computed(
    bench: LateBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.streams.is_held_up = True
    bench.streams.host_waits.clear()  # those of the set-up

    def grant() -> None:
        for op in (1, 2):
            bench.grant(bench.operation(Phase.FORWARD, op - 1, op))

    bench.wait_until_given(bench.streams.compute, 2, monkeypatch, grant)
    assert bench.ssds.of(ComputeProgressed) == []
    bench.streams.is_held_up = False
    assert [computed.op for computed in bench.receive_computed(2)] == [1, 2]
    assert not bench.streams.host_waits


@pytest.mark.parametrize("bench", [0], indirect=True)
def test_so_many_of_the_granted_operations_are_prefetched_and_given_at_a_time(
    bench: LateBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = bench.spec.ordering.max_prefetched
    request, prefetched = bench.worker._feed.request, list[int]()

    def note(operation: ComputeBlock) -> None:
        assert len(bench.worker._launched) < limit
        prefetched.append(operation.op)
        request(operation)

    monkeypatch.setattr(bench.worker._feed, "request", note)
    bench.streams.is_held_up = True
    operations = [bench.operation(Phase.FORWARD, op - 1, op) for op in (1, 2, 3, 4)]
    with pytest.MonkeyPatch.context() as patch:
        bench.wait_until_given(bench.streams.compute, limit, patch, lambda: bench.grant(*operations))
    assert prefetched == [1, 2]
    bench.streams.is_held_up = False
    assert [computed.op for computed in bench.receive_computed(4)] == [1, 2, 3, 4]
    assert prefetched == [1, 2, 3, 4]


@pytest.mark.parametrize("bench", [("d2h", "h2d", "compute")], indirect=True)
def test_a_gradient_leaves_when_it_is_computed(bench: LateBench, monkeypatch: pytest.MonkeyPatch) -> None:
    last = len(bench.layout.blocks) - 1
    for block in range(last):
        bench.run(Phase.FORWARD, block)
    copy_out, num_copies = bench.worker._grads._copy_out, 0

    def note(request: ComputeBlock, grad: Any) -> Any:
        nonlocal num_copies
        num_copies += 1
        assert bench.worker._launched == [], "the head is not computed yet"
        return copy_out(request, grad)

    bench.streams.is_held_up = True
    head = bench.operation(Phase.HEAD, last, 90)
    bench.wait_until_given(bench.streams.compute, 1, monkeypatch, lambda: bench.grant(head))
    monkeypatch.setattr(bench.worker._grads, "_copy_out", note)
    assert bench.grads == []
    bench.streams.is_held_up = False
    grad = bench.received_grad(last, 1)
    (done,) = bench.grads
    assert num_copies == 1
    assert float(grad.double().square().sum()) == pytest.approx(sum(done.sq_sums), rel=1e-5)
