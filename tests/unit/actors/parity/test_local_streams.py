"""A whole job on a device whose streams run late gives the same numbers as on one that does everything at once."""

import functools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actors.stage_runs import STAGES
from tests.support.fake_cuda import FakeCuda
from tests.support.late_streams import LateStreams
from tests.support.stream_jobs import JOBS
from tests.support.training import (
    boxes_of,
    exported_params,
    has_direct_io,
    losses_of,
    make_partition,
    make_spec,
    metrics_of,
)
from windlass.actors.gpu_worker import compute as computation
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.messages import ComputeProgressed, GradOffloaded, Message, Phase, SpanKind, SpansReported, WorkSpan
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.timeline import COMPUTE
from windlass.actors.worker_policy.stages import Stage
from windlass.engine.device import device as device_module
from windlass.engine.device.buffer_pool import DeviceBuffers
from windlass.engine.device.cuda_streams import CudaStreams
from windlass.engine.device.device import Device
from windlass.engine.device.streams import StartThreads
from windlass.engine.optimizer.grad_norm import squared_norm
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ActorName

pytestmark = pytest.mark.usefixtures("small_activation_slots")

NUM_STEPS = 4
STREAMS = ("compute", "h2d", "d2h")
# Kinds of work of a device: operations and updates.
_WORK = {SpanKind(phase) for phase in Phase} | {SpanKind.UPDATE}
ORDERS = [*permutations(STREAMS), 1, 2]


@dataclass(frozen=True)
class Result:
    """The results of a job. Numbers are compared bit for bit."""

    losses: list[float]
    validation_losses: dict[int, float]
    params: dict[str, torch.Tensor]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Result)
        same_params = all(torch.equal(param, other.params[name]) for name, param in self.params.items())
        return (self.losses, self.validation_losses) == (other.losses, other.validation_losses) and same_params


def run(
    root: Path,
    job: str,
    on_message: Callable[[ActorName, Message], None] | None = None,
    *,
    stages: tuple[Stage, ...] = (),
) -> Result | None:
    """Runs a job, on several boxes if it has several stages; returns None if it failed."""
    spec = make_spec(root, total_steps=NUM_STEPS, evaluate_every=2, **JOBS[job])
    first, *others = [spec]
    if stages:  # which commit the same steps
        spec = replace(spec, placement=replace(spec.placement, commit_every=2))
        first, *others = boxes_of(spec, stages)
    outcome = run_local(
        first,
        other_boxes=others,
        partition=make_partition(spec),
        poison_released=True,
        direct=has_direct_io(root),
        on_message=on_message,
    )
    if outcome["status"] != "succeeded":
        return None
    return Result(losses_of(spec), metrics_of(spec, "valid_loss"), exported_params(spec))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The results of a job on streams that do everything at once."""

    @functools.cache
    def of(job: str) -> Result:
        result = run(tmp_path_factory.mktemp("expected") / "job", job)
        assert result is not None
        return result

    return of


class Late:
    """Gives a worker a device that runs late, on `streams`."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __enter__(self) -> "Late":
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(device_module, "open_streams", self.open)
        for module in (gpu_worker, computation):
            self._patch.setattr(module, "squared_norm", self.squared_norm)
        # The check computes in its calling thread, on a device of its own.
        self._patch.setattr(gpu_worker, "check_architecture", lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def open(self, device: torch.device, token: CancelToken, start_threads: StartThreads) -> LateStreams:
        self.streams = LateStreams(start_threads, token=token, **self.options)
        return self.streams

    def squared_norm(self, grad: torch.Tensor) -> torch.Tensor:
        """Computed without counting, because the CPU's version uses other operators than the GPU's."""
        with self.streams.uncounted():
            return squared_norm(grad)


def cases() -> list[Any]:
    """One case for each fast job in one order; the other cases are slow."""
    return [
        pytest.param(
            job,
            order,
            marks=() if (3 * i + j) % 16 == 0 and job not in ("streamed", "far ahead") else pytest.mark.long,
            id=f"{job}-{order}",
        )
        for i, job in enumerate(JOBS)
        for j, order in enumerate(ORDERS)
    ]


def test_device_of_a_cpu_does_one_thing_at_a_time(tmp_path: Path) -> None:
    """Updates on the device and operations share the cores, so each takes its own time only without the others."""
    spans: list[WorkSpan] = []

    def look(_to: ActorName, message: Message) -> None:
        if isinstance(message, SpansReported):
            spans.extend(span for span in message.spans if span.resource == COMPUTE and span.kind in _WORK)

    assert run(tmp_path, "mixed", look) is not None
    spans.sort(key=lambda span: span.start_s)
    assert {span.kind for span in spans} == _WORK
    assert all(one.end_s <= other.start_s for one, other in pairwise(spans))


@pytest.mark.short("mixed-2")
@pytest.mark.parametrize(("job", "order"), cases())
def test_streams_that_run_behind_change_no_number(
    tmp_path: Path, expected: Callable[[str], Result], job: str, order: Any
) -> None:
    of_streams_at_once = expected(job)  # before the streams are exchanged, because the first call runs the job
    with Late(order=order):
        assert run(tmp_path / "job", job) == of_streams_at_once


@pytest.mark.parametrize(
    ("job", "forgotten", "order"),
    [
        ("active", ("compute", "h2d"), ("compute", "d2h", "h2d")),
        ("active", ("compute", "d2h"), ("compute", "h2d", "d2h")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_streams_with_a_missing_wait_change_a_number(
    tmp_path: Path, expected: Callable[[str], Result], job: str, forgotten: tuple[str, str], order: Any
) -> None:
    """On a busy machine an error shows only if the device runs far behind."""

    of_streams_at_once = expected(job)  # as above

    def shows(quiet_s: float) -> bool:
        with Late(order=order, forgets=lambda *pair: pair == forgotten, quiet_s=quiet_s):
            found = run(tmp_path / f"job-{quiet_s}", job)
        return found is None or found != of_streams_at_once

    assert any(map(shows, (0.0005, 0.01, 0.1)))


@pytest.mark.parametrize(
    "job", [pytest.param("kept", marks=pytest.mark.long), "mixed", pytest.param("streamed", marks=pytest.mark.long)]
)
def test_no_thread_waits_for_the_device_and_nothing_is_allocated_for_params_or_gradients(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step on, with evaluation and flushes."""
    waits: list[Counter[str]] = []
    made: list[tuple[int, ...]] = []
    late = Late(order=1)

    def look(_: ActorName, message: Message) -> None:
        computed = message.computed if isinstance(message, ComputeProgressed) else ()
        if any((each.phase, each.step) == (Phase.HEAD, 2) for each in computed):
            waits.append(late.streams.host_waits.copy())
            monkeypatch.setattr(DeviceBuffers, "__init__", lambda *_, **__: made.append(()))
            monkeypatch.setattr(Device, "take", lambda *_, **__: made.append(()))

    with late:
        assert run(tmp_path / "job", job, look) is not None
    assert waits == [late.streams.host_waits]
    assert not late.streams.syncs
    assert made == []


@pytest.mark.parametrize("job", [pytest.param("kept", marks=pytest.mark.long), "mixed"])
def test_gpu_streams_report_results_from_their_own_threads(
    tmp_path: Path, expected: Callable[[str], Result], job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams as on a GPU, with events that are reached at once.

    Other threads than those that submit work send the messages.
    """
    of_streams_at_once = expected(job)  # as above
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(device_module, "open_streams", CudaStreams)
    senders: dict[str, set[threading.Thread]] = {"operation": set(), "offloaded gradient": set()}

    def look(_: ActorName, message: Message) -> None:
        if isinstance(message, GradOffloaded):
            senders["offloaded gradient"].add(threading.current_thread())
        elif isinstance(message, ComputeProgressed) and not message.grads:
            senders["operation"].add(threading.current_thread())

    assert run(tmp_path / "job", job, look) == of_streams_at_once
    (computed,), (offloaded,) = senders.values()
    assert computed is not offloaded
    assert not any("compute" in thread.name or "GradOffload" in thread.name for thread in (computed, offloaded))


@pytest.mark.long
@pytest.mark.parametrize("job", ["groups", "lanes", "gradients in one memory", "lanes in one memory"])
def test_boxes_with_gpu_streams_share_an_embedding(
    tmp_path: Path, expected: Callable[[str], Result], job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams as above. The embedding is on the first box, and the head uses it on the last one."""
    of_streams_at_once = expected(job)  # as above
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(device_module, "open_streams", CudaStreams)
    assert JOBS[job]["tied"]
    assert run(tmp_path / "job", job, stages=STAGES["2-1-2"]) == of_streams_at_once
