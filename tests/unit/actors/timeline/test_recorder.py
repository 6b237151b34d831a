"""The spans that actors record: none is lost or reported twice, and none is held for long."""

import threading
from typing import Any

import pytest

from windlass.actors.messages import Crossing, Message, Phase, SpanKind, SpanPulled, SpansReported, WorkSpan
from windlass.actors.timeline.recorder import SpanRecorder, transfer_kind
from windlass.storage.ids import ActorName, BlockIndex, ChunkIndex, ChunkKey, JobId, StateKind, Step


class Receiver:
    def __init__(self) -> None:
        self.told: list[SpansReported] = []

    def send(self, to: ActorName, message: Message) -> None:
        assert to == "scheduler"
        assert isinstance(message, SpansReported)
        self.told.append(message)


def make_log(receiver: Receiver) -> SpanRecorder:
    return SpanRecorder(ActorName("optimizer-1"), JobId("ftjob-1"), receiver.send)


def test_recorded_span_is_reported_once() -> None:
    receiver = Receiver()
    log = make_log(receiver)
    log.tell(1)
    assert receiver.told == []
    log.note("optimizer-1", SpanKind.UPDATE, 3, 2, 1, 10.0, 10.5)
    log.note("ssd-0", SpanKind.READ_STATES, 2, 2, 1, 9.0, 10.0, 4096)
    log.tell(3)
    log.tell(3)
    (told,) = receiver.told
    assert (told.job, told.step, told.actor) == ("ftjob-1", 3, "optimizer-1")
    assert told.spans == (
        WorkSpan("optimizer-1", SpanKind.UPDATE, 3, 2, 1, 10.0, 10.5, 0),
        WorkSpan("ssd-0", SpanKind.READ_STATES, 2, 2, 1, 9.0, 10.0, 4096),
    )


def test_batch_is_recorded_as_one_span_a_chunk_whose_times_follow_each_other() -> None:
    receiver = Receiver()
    log = make_log(receiver)
    keys = [ChunkKey(BlockIndex(2), ChunkIndex(chunk)) for chunk in (0, 1, 5)]
    log.note_batch("gpu-0/h2d", SpanKind.COPY_PARAMS_IN, 3, dict(zip(keys, (100, 300, 0), strict=True)), 10.0, 14.0)
    log.note_batch("gpu-0/h2d", SpanKind.COPY_PARAMS_IN, 3, {keys[0]: 0}, 14.1, 14.3)
    log.tell(3)
    (told,) = receiver.told
    assert told.spans == (
        WorkSpan("gpu-0/h2d", SpanKind.COPY_PARAMS_IN, 3, 2, 0, 10.0, 11.0, 100),
        WorkSpan("gpu-0/h2d", SpanKind.COPY_PARAMS_IN, 3, 2, 1, 11.0, 14.0, 300),
        WorkSpan("gpu-0/h2d", SpanKind.COPY_PARAMS_IN, 3, 2, 5, 14.0, 14.0, 0),
        WorkSpan("gpu-0/h2d", SpanKind.COPY_PARAMS_IN, 3, 2, 0, 14.1, 14.3, 0),
    )


@pytest.mark.parametrize(
    ("crossing", "kind"),
    [
        (Crossing(Step(3), Phase.FORWARD, BlockIndex(2), 1, 4), SpanKind.PULL_HIDDEN),
        (Crossing(Step(3), Phase.EVALUATE_HEAD, BlockIndex(2), 1, 4), SpanKind.PULL_HIDDEN),
        (Crossing(Step(3), Phase.BACKWARD, BlockIndex(2), 1, 4), SpanKind.PULL_GRADS),
        (Crossing(Step(3), Phase.BACKWARD, BlockIndex(2), 1, 4, is_shared=True), SpanKind.PULL_SHARED),
        (Crossing.of_params(Step(3), ChunkKey(BlockIndex(2), ChunkIndex(4))), SpanKind.PULL_EXPORTED),
    ],
)
def test_what_came_from_another_box_is_a_span_of_the_link_between_both(crossing: Crossing, kind: SpanKind) -> None:
    receiver = Receiver()
    log = SpanRecorder(ActorName("b2/gpu-1"), JobId("ftjob-1"), receiver.send)
    facts: dict[str, Any] = {"box": 1, "nbytes": 4096, "start_s": 10.0, "end_s": 10.5}
    log.note_pulled(SpanPulled(job=JobId("ftjob-1"), step=Step(3), crossing=crossing, **facts))
    log.tell(3)
    assert receiver.told[0].spans == (WorkSpan("link-1-2", kind, 3, 2, 4, 10.0, 10.5, 4096, 1),)


def test_nothing_is_lost_between_threads() -> None:
    receiver = Receiver()
    log = make_log(receiver)

    def work(block: int) -> None:
        for chunk in range(1000):
            log.note("optimizer-1", SpanKind.UPDATE, 1, block, chunk, 0.0, 1.0)
            if chunk % 7 == 0:
                log.tell(1)

    threads = [threading.Thread(target=work, args=(block,)) for block in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.tell(1)
    places = [(span.block, span.chunk) for message in receiver.told for span in message.spans]
    assert sorted(places) == [(block, chunk) for block in range(4) for chunk in range(1000)]


def test_many_recorded_spans_are_reported_automatically() -> None:
    receiver = Receiver()
    log = make_log(receiver)
    for chunk in range(5000):
        log.note("ssd-0", SpanKind.WRITE_STATES, 0, 0, chunk, 0.0, 1.0, 4096)
    (told,) = receiver.told
    assert len(told.spans) == 4096


@pytest.mark.parametrize(
    ("is_read", "states", "kind"),
    [
        (True, [StateKind.GRAD], SpanKind.READ_GRAD),
        (False, [StateKind.GRAD], SpanKind.WRITE_GRAD),
        (True, [StateKind.PARAM], SpanKind.READ_PARAMS),
        (False, [StateKind.PARAM], SpanKind.WRITE_STATES),
        (True, [StateKind.PARAM, StateKind.MASTER], SpanKind.READ_STATES),
        (True, [StateKind.MASTER, StateKind.EXP_AVG], SpanKind.READ_STATES),
        (False, [StateKind.MASTER, StateKind.EXP_AVG], SpanKind.WRITE_STATES),
    ],
)
def test_transfer_kinds_depend_on_moved_states(is_read: bool, states: list[StateKind], kind: SpanKind) -> None:
    assert transfer_kind(is_read=is_read, states=states, param_kind=StateKind.PARAM) is kind


def test_in_fp32_the_master_is_the_param() -> None:
    kind = transfer_kind(is_read=True, states=[StateKind.MASTER], param_kind=StateKind.MASTER)
    assert kind is SpanKind.READ_PARAMS
