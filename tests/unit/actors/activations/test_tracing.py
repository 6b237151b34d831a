"""Copies of activations as spans: successive copies of a block are one span."""

from windlass.actors.activations.tracing import ActivationSpans
from windlass.actors.messages import Message, SpanKind, SpansReported, WorkSpan
from windlass.actors.timeline.recorder import COMPUTE, FROM_DEVICE, TO_DEVICE, WHOLE_BLOCK, SpanRecorder
from windlass.storage.ids import ActorName, BlockIndex, JobId, Step


class Notes:
    def __init__(self) -> None:
        self.told: list[WorkSpan] = []
        self.log = SpanRecorder(ActorName("gpu-0"), JobId("job"), self._send)
        self.spans = ActivationSpans(self.log)

    def _send(self, to: ActorName, message: Message) -> None:
        assert isinstance(message, SpansReported)
        self.told += message.spans

    def tell(self) -> list[WorkSpan]:
        self.spans.flush()
        self.log.tell(1)
        return self.told


def out(block: int, start_s: float, end_s: float, nbytes: int, step: int = 1) -> WorkSpan:
    return WorkSpan(FROM_DEVICE, SpanKind.COPY_ACTIVATIONS_OUT, step, block, WHOLE_BLOCK, start_s, end_s, nbytes)


def back(block: int, start_s: float, end_s: float, nbytes: int) -> WorkSpan:
    return WorkSpan(TO_DEVICE, SpanKind.COPY_ACTIVATIONS_IN, 1, block, WHOLE_BLOCK, start_s, end_s, nbytes)


def test_copies_of_a_block_that_follow_each_other_are_one_span() -> None:
    notes = Notes()
    notes.spans.begin(Step(1), BlockIndex(3))
    owner = notes.spans.owner()
    notes.spans.moved(owner, 1.0, 2.0, 10, is_out=True)
    notes.spans.moved(owner, 2.00005, 3.0, 20, is_out=True)
    notes.spans.moved(owner, 2.5, 2.6, 7, is_out=False)  # the other direction
    notes.spans.moved(owner, 3.1, 4.0, 30, is_out=True)  # after a pause
    notes.spans.begin(Step(1), BlockIndex(4))
    notes.spans.moved(notes.spans.owner(), 4.0, 5.0, 40, is_out=True)
    expected = [out(3, 1.0, 3.0, 30), out(3, 3.1, 4.0, 30), out(4, 4.0, 5.0, 40), back(3, 2.5, 2.6, 7)]
    assert sorted(notes.tell()) == sorted(expected)


def test_bytes_belong_to_the_operation_that_put_them() -> None:
    notes = Notes()
    notes.spans.begin(Step(1), BlockIndex(3))
    owner = notes.spans.owner()
    notes.spans.begin(Step(2), BlockIndex(0))
    notes.spans.moved(owner, 1.0, 2.0, 10, is_out=True)
    assert notes.tell() == [out(3, 1.0, 2.0, 10)]


def test_copies_that_were_reported_are_not_reported_again() -> None:
    notes = Notes()
    notes.spans.moved(notes.spans.owner(), 1.0, 2.0, 10, is_out=True)
    notes.tell()
    notes.spans.moved(notes.spans.owner(), 2.0, 3.0, 10, is_out=True)
    assert notes.tell() == [out(0, 1.0, 2.0, 10, step=0), out(0, 2.0, 3.0, 10, step=0)]


def test_wait_belongs_to_operation_of_its_owner() -> None:
    notes = Notes()
    notes.spans.begin(Step(2), BlockIndex(5))
    owner = notes.spans.owner()
    notes.spans.begin(Step(2), BlockIndex(4))
    notes.spans.waited(owner, 1.0, 1.5)
    assert notes.tell() == [WorkSpan(COMPUTE, SpanKind.WAIT_ACTIVATIONS, 2, 5, WHOLE_BLOCK, 1.0, 1.5, 0)]
