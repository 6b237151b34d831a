"""A stream that fails or hangs in the middle of a step: a named error in time, and the next attempt resumes.

Tested as on a GPU, where threads wait for the device and report results. Also as on a CPU, where swapped activations
have streams with threads.
"""

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_cuda import FakeCuda
from tests.support.training import has_direct_io, journal_of, leftovers_of, losses_of, make_partition, make_spec
from windlass.actors.gpu_worker.compute import Computation
from windlass.actors.gpu_worker.grad_offload import GradOffload
from windlass.actors.gpu_worker.operation import LaunchedOperation
from windlass.actors.gpu_worker.param_prefetcher import ParamFeed
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import Phase
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.scheduler import scheduler
from windlass.actors.scheduler.scheduler import INTERRUPTED
from windlass.engine.device import device as device_module
from windlass.engine.device.cuda_streams import CudaStreams
from windlass.engine.device.streams import CpuStreams, Stream, ThreadStream
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import Attempt

pytestmark = pytest.mark.usefixtures("small_activation_slots", "unchecked_activations")

STEP = 2
WAIT_S = 30.0
DEADLINE_S = 3.0
SWAPPING = Placement(activations=ActivationChoice.SWAP.of_layers(3), host_activation_nbytes=4 << 20)


def job(root: Path, **options: Any) -> JobSpec:
    return make_spec(root, total_steps=3, evaluate_every=None, deadline_s=DEADLINE_S, **options)


@contextmanager
def changed(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes to other values inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in changes:
            patch.setattr(owner, name, value)
        yield


def run(spec: JobSpec) -> dict[str, Any]:
    with changed((scheduler, "_TICK_S", 0.1)):  # timeouts are short here
        return run_local(spec, partition=make_partition(spec), direct=has_direct_io(Path(spec.model_dir)))


def in_the_middle(phase: Phase, act: Callable[[], object]) -> tuple[Any, str, Any]:
    """A change that calls `act` when a phase of the second layer begins."""
    compute = Computation.compute

    def acts(self: Computation, operation: LaunchedOperation, *arguments: Any) -> None:
        message = operation.message
        if (message.step, message.phase, message.block) == (STEP, phase, 2):
            act()
        compute(self, operation, *arguments)

    return Computation, "compute", acts


def error_of(spec: JobSpec) -> str:
    """The error message with which the attempt ended."""
    outcome = journal_of(spec)[-1]
    assert (outcome.kind, outcome.data["status"]) == ("outcome", INTERRUPTED)
    return str(outcome.data["error"]["message"])


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an undisturbed job."""
    spec = dataclasses.replace(job(tmp_path_factory.mktemp("undisturbed") / "job"), deadline_s=60.0)
    assert run(spec)["status"] == "succeeded"
    return losses_of(spec)


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """The threads that earlier tests of hanging have left."""
    _others.update(threading.enumerate())
    yield
    _others.clear()


_others: set[threading.Thread] = set()


def goes_on(spec: JobSpec, losses: list[float]) -> None:
    """Checks that another attempt resumes with the same losses, after the hanging threads have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("gpu-0 ") and thread not in _others:
            thread.join(WAIT_S)
            assert not thread.is_alive()
    again = dataclasses.replace(spec, attempt=Attempt(2), deadline_s=60.0)
    assert run(again)["status"] == "succeeded"
    assert losses_of(spec) == losses
    assert leftovers_of(spec) == []


@pytest.fixture
def gpu() -> Iterator[FakeCuda]:
    """A fake GPU whose streams are opened by `as_on`."""
    cuda = FakeCuda()
    yield cuda
    cuda.may_synchronize.set()


@contextmanager
def as_on(gpu: FakeCuda, *changes: tuple[Any, str, Any]) -> Iterator[None]:
    with changed((device_module, "open_streams", CudaStreams), *changes), pytest.MonkeyPatch.context() as patch:
        gpu.install(patch)
        yield


def test_gpu_that_never_reaches_an_event_is_reported_and_can_be_closed(
    tmp_path: Path, gpu: FakeCuda, losses: list[float]
) -> None:
    spec = job(tmp_path / "job")
    hangs = r"gpu-0 CudaStream\._run.* end this process before the job goes on"
    with (
        as_on(gpu, in_the_middle(Phase.BACKWARD, gpu.may_synchronize.clear)),
        pytest.raises(TimeoutError, match=hangs),
    ):
        run(spec)
    gpu.may_synchronize.set()
    error = error_of(spec)
    assert re.search(
        rf"gpu-0 has been silent for [\d.]+ s; its oldest .* is the \w+ of block \d in step {STEP};", error
    )
    assert re.search(r"gpu-0: .*CudaStream\._run is busy", error)
    goes_on(spec, losses)


def test_kernel_error_is_reported_with_its_operation(tmp_path: Path, gpu: FakeCuda, losses: list[float]) -> None:
    spec = job(tmp_path / "job")

    def fail() -> None:
        gpu.failure = RuntimeError("CUDA error: an illegal memory access was encountered")

    with as_on(gpu, in_the_middle(Phase.BACKWARD, fail)):
        run(spec)
    told = rf"gpu-0: RuntimeError: CUDA error: .* \(at compute block, backward, of step {STEP}, block \d\)"
    assert re.fullmatch(told, error_of(spec))
    goes_on(spec, losses)


@pytest.mark.short("d2h")
@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (LaunchedOperation, "report", f"compute block, backward, of step {STEP}"),
        (ParamFeed, "chunks_copied", r"compute block, \w+, of step \d"),
        (GradOffload, "_note", f"compute block, (head|backward), of step {STEP}"),
    ],
    ids=["compute", "h2d", "d2h"],
)
def test_callback_that_raises_is_reported_with_its_operation(
    tmp_path: Path, gpu: FakeCuda, owner: type, name: str, told: str, losses: list[float]
) -> None:
    is_due, called = threading.Event(), getattr(owner, name)

    def breaks(*args: Any, **kwargs: Any) -> Any:
        if is_due.is_set():
            raise RuntimeError("broken for the test")
        return called(*args, **kwargs)

    spec = job(tmp_path / "job")
    with as_on(gpu, (owner, name, breaks), in_the_middle(Phase.BACKWARD, is_due.set)):
        run(spec)
    assert re.fullmatch(rf"gpu-0: RuntimeError: broken for the test \(at {told}, block \d\)", error_of(spec))
    goes_on(spec, losses)


class HangingStream(ThreadStream):
    """A stream whose copies do not end while it is blocked."""

    going: threading.Event

    def run(self, work: Callable[[], object]) -> None:
        def copy() -> None:
            assert self.going.wait(WAIT_S)
            work()

        super().run(copy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "phase"), [pytest.param("out", Phase.FORWARD, marks=pytest.mark.long), ("in", Phase.BACKWARD)]
)
def test_activation_copy_that_hangs_is_reported_and_can_be_closed(
    tmp_path: Path, way: str, phase: Phase, losses: list[float]
) -> None:
    open_stream, opened, going = CpuStreams.open, [], threading.Event()
    going.set()

    def open_hanging(self: CpuStreams) -> Stream:
        opened.append("in" if opened else "out")
        if opened[-1] != way:
            return open_stream(self)
        stream = HangingStream(self._token, self._start_threads)
        stream.going = going
        return stream

    spec = job(tmp_path / "job", placement=SWAPPING)
    with changed((CpuStreams, "open", open_hanging), in_the_middle(phase, going.clear)):
        with pytest.raises(TimeoutError, match=r"gpu-0 ThreadStream\._run.* end this process before the job goes on"):
            run(spec)
        going.set()
    error = error_of(spec)
    assert re.search(
        rf"gpu-0 has been silent for [\d.]+ s; its oldest .* is the \w+ of block \d in step {STEP};", error
    )
    assert re.search(rf"gpu-0: .*has waited .* s for .* \(at compute block, \w+, of step {STEP}, block \d", error)
    goes_on(spec, losses)
