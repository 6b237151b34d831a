"""One rank on a device whose streams run late, as a GPU's do."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.actors.worker_bench import STEP, Bench, running
from tests.support.late_streams import LateStreams
from windlass.actors.messages import BlockBackwardDone, BlockComputed, OffloadGrad, Phase
from windlass.engine.device import device as device_module
from windlass.engine.device.streams import StartThreads, Stream
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import BlockIndex

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

    def open_streams(device: torch.device, deadline_s: float, start_threads: StartThreads) -> LateStreams:
        opened.append(LateStreams(start_threads, order=request.param))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "open_streams", open_streams)
        bench = LateBench(tmp_path, placement=Placement(num_cached_params=100))
    (bench.streams,) = opened
    with running(bench):
        yield bench
        bench.streams.is_held_up = False


@pytest.mark.parametrize("bench", [0], indirect=True)
def test_an_operation_is_given_while_the_one_before_is_computed(
    bench: LateBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.streams.is_held_up = True
    bench.streams.host_waits.clear()  # those of the set-up

    def post() -> None:
        for op in (1, 2):
            bench.prefetch(op - 1, op)
            bench.compute(Phase.FORWARD, op - 1, op)

    bench.wait_until_given(bench.streams.compute, 2, monkeypatch, post)
    assert bench.ssds.of(BlockComputed) == []
    bench.streams.is_held_up = False
    assert [computed.op for computed in bench.ssds.receive(BlockComputed, 2)] == [1, 2]
    assert not bench.streams.host_waits


@pytest.mark.parametrize("bench", [("d2h", "h2d", "compute")], indirect=True)
def test_a_gradient_leaves_when_it_is_computed_whenever_that_is_asked_for(
    bench: LateBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = len(bench.layout.blocks) - 1
    for block in range(last):
        bench.run(Phase.FORWARD, block)
    bench.streams.is_held_up = True

    def head() -> None:
        bench.prefetch(last, 90, Phase.HEAD)
        bench.compute(Phase.HEAD, last, 90)

    bench.wait_until_given(bench.streams.compute, 1, monkeypatch, head)
    offload = OffloadGrad(job=bench.spec.job, step=STEP, block=BlockIndex(last))
    num_chunks = bench.layout.num_chunks(BlockIndex(last))
    bench.wait_until_given(bench.streams.d2h, num_chunks + 1, monkeypatch, lambda: bench.worker.post(offload))
    assert bench.ssds.of(BlockBackwardDone) == []
    bench.streams.is_held_up = False
    grad = bench.received_grad(last, 1)
    (done,) = bench.ssds.receive(BlockBackwardDone)
    assert float(grad.double().square().sum()) == pytest.approx(done.grad_sq_sum, rel=1e-5)
