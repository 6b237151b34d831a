"""The reports of an operation to the scheduler and to the timeline, once the device has finished it."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from windlass.actors.gpu_worker.operation import LaunchedOperation
from windlass.actors.messages import (
    BlockComputed,
    ComputeBlock,
    Loss,
    Message,
    Phase,
    SpanKind,
    SpansReported,
    StoredParams,
    WorkSpan,
)
from windlass.actors.timeline.recorder import COMPUTE, WHOLE_BLOCK, SpanRecorder
from windlass.engine.device.device import Device
from windlass.storage.ids import ActorName, BlockIndex, JobId, Step

JOB, STEP, BLOCK = JobId("job"), Step(3), BlockIndex(2)


@dataclass
class At:
    """An event that has been reached."""

    at_s: float

    def is_over(self) -> bool:
        return True

    def wait(self, deadline_s: float) -> None:
        raise AssertionError("nobody waits for what has ended")

    def time_s(self) -> float:
        return self.at_s


class Stage:
    def __init__(self, phase: Phase, monkeypatch: pytest.MonkeyPatch, *, is_last: bool = True) -> None:
        message = ComputeBlock(
            job=JOB,
            step=STEP,
            op=7,
            phase=phase,
            block=BLOCK,
            params=(StoredParams(BLOCK, Step(2)),),
            group=1,
            loss_scale=1.0,
        )
        device = Device(torch.device("cpu"))
        monkeypatch.setattr(device.compute, "record", lambda: At(self.now_s))
        self.now_s = 0.0
        self.operation = LaunchedOperation(message, device, num_targets=40, is_last=is_last)
        self.told: list[WorkSpan] = []

    def ends(
        self,
        begun_s: float,
        computed_s: float,
        ended_s: float,
        sq_sums: tuple[float, ...] = (),
        losses: tuple[float, ...] = (),
        **numbers: float,
    ) -> BlockComputed:
        operation = self.operation
        operation.begun, operation.computed, operation.ended = At(begun_s), At(computed_s), At(ended_s)
        operation.numbers.update({name: torch.tensor(number) for name, number in numbers.items()})
        operation.losses = list(map(torch.tensor, losses))
        operation.sq_sums = list(map(torch.tensor, sq_sums))
        operation.download()
        return operation.report()

    def waits(self, kind: SpanKind, block: int, start_s: float, end_s: float, **facts: Any) -> None:
        self.now_s = end_s
        self.operation.waited(kind, BlockIndex(block), start_s, **facts)

    def spans(self) -> list[tuple[SpanKind, int, float, float]]:
        log = SpanRecorder(ActorName("gpu-0"), JOB, self._send)
        self.operation.note(log)
        log.tell(STEP)
        assert {(span.resource, span.step, span.chunk, span.nbytes) for span in self.told} == {
            (COMPUTE, STEP, WHOLE_BLOCK, 0)
        }
        return [(span.kind, span.block, span.start_s, span.end_s) for span in self.told]

    def _send(self, to: ActorName, message: Message) -> None:
        assert isinstance(message, SpansReported)
        self.told += message.spans


def computed(phase: Phase, *, compute_s: float, is_finite: bool, loss: Loss | None = None) -> BlockComputed:
    return BlockComputed(
        job=JOB,
        step=STEP,
        op=7,
        phase=phase,
        block=BLOCK,
        group=1,
        compute_s=compute_s,
        is_finite=is_finite,
        loss=loss,
    )


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_forward_pass_tells_whether_its_output_is_finite(monkeypatch: pytest.MonkeyPatch, is_finite: bool) -> None:
    stage = Stage(Phase.FORWARD, monkeypatch)
    assert not stage.operation.goes_backward
    told = stage.ends(1.0, 3.0, 4.0, output_sq_sum=2.0 if is_finite else math.inf)
    assert told == computed(Phase.FORWARD, compute_s=2.0, is_finite=is_finite)
    assert stage.operation.grad_sq_sums == ()


@pytest.mark.parametrize("loss_sum", [12.5, math.nan])
def test_a_head_tells_its_loss_with_that_it_is_done(monkeypatch: pytest.MonkeyPatch, loss_sum: float) -> None:
    stage = Stage(Phase.HEAD, monkeypatch)
    assert stage.operation.goes_backward
    told = stage.ends(1.0, 2.0, 4.0, (0.25, 4.0), losses=(loss_sum,), num_correct=9)
    loss = told.loss
    assert loss is not None
    assert (loss.num_targets, loss.num_correct) == (40, 9)
    assert loss.terms == (loss_sum,) or math.isnan(loss_sum)
    assert told == computed(Phase.HEAD, compute_s=1.0, is_finite=math.isfinite(loss_sum), loss=loss)
    assert stage.operation.grad_sq_sums == (0.25, 4.0)


def test_a_gradient_that_is_not_finite_is_told_by_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Phase.BACKWARD, monkeypatch)
    told = stage.ends(1.0, 2.0, 4.0, (math.inf,))
    assert stage.operation.grad_sq_sums == (math.inf,)
    assert told == computed(Phase.BACKWARD, compute_s=1.0, is_finite=True)


def test_a_group_that_is_not_the_last_tells_its_loss_and_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Phase.HEAD, monkeypatch, is_last=False)
    told = stage.ends(1.0, 3.0, 4.0, losses=(math.nan,), num_correct=0)
    assert told.loss is not None
    assert math.isnan(told.loss.terms[0])
    assert told == computed(Phase.HEAD, compute_s=2.0, is_finite=False, loss=told.loss)
    assert stage.operation.grad_sq_sums == ()
    stage = Stage(Phase.BACKWARD, monkeypatch, is_last=False)
    assert stage.ends(1.0, 3.0, 4.0) == computed(Phase.BACKWARD, compute_s=2.0, is_finite=True)
    assert stage.operation.grad_sq_sums == ()


def test_waits_follow_each_other_and_the_operation_follows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Phase.BACKWARD, monkeypatch)
    stage.waits(SpanKind.WAIT_OPERATION, 2, 1.0, 1.5)
    stage.waits(SpanKind.WAIT_PARAMS, 2, 1.6, 2.0)
    stage.ends(2.0, 3.0, 4.0, (1.0,))
    assert stage.spans() == [
        (SpanKind.WAIT_OPERATION, 2, 1.0, 1.5),
        (SpanKind.WAIT_PARAMS, 2, 1.6, 2.0),
        (SpanKind.BACKWARD, 2, 2.0, 4.0),
    ]


def test_wait_for_early_request_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead: it requests the second params while the device waits for the first."""
    stage = Stage(Phase.HEAD, monkeypatch)
    stage.waits(SpanKind.WAIT_PARAMS, 2, 1.0, 3.0)
    stage.waits(SpanKind.WAIT_PARAMS, 0, 1.1, 5.0)
    stage.waits(SpanKind.WAIT_GRAD_BUFFER, 2, 1.2, 4.9)  # was free when the params arrived
    stage.ends(5.0, 6.0, 6.0, (1.0,), losses=(1.0,), num_correct=1)
    assert stage.spans() == [
        (SpanKind.WAIT_PARAMS, 2, 1.0, 3.0),
        (SpanKind.WAIT_PARAMS, 0, 3.0, 5.0),
        (SpanKind.HEAD, 2, 5.0, 6.0),
    ]


def test_wait_to_send_results_begins_when_the_operation_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead: it waits for a slot while the device computes what goes there."""
    stage = Stage(Phase.BACKWARD, monkeypatch)
    stage.waits(SpanKind.WAIT_BOX, 2, 1.0, 2.0, box=1)
    stage.ends(2.0, 3.0, 4.0, (1.0,))
    stage.waits(SpanKind.WAIT_BOX, 2, 2.5, 6.0, box=0, after=stage.operation.ended)
    assert stage.spans() == [
        (SpanKind.WAIT_BOX, 2, 1.0, 2.0),
        (SpanKind.WAIT_BOX, 2, 4.0, 6.0),
        (SpanKind.BACKWARD, 2, 2.0, 4.0),
    ]
    assert [span.box for span in stage.told] == [1, 0, -1]
