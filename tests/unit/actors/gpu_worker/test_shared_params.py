"""The params of an embedding go to the head's box once a version, and the head's gradient of them comes back."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.gpu_worker.edges.shared_params import SharedParams
from windlass.actors.job.context import gpu_worker_name, make_context
from windlass.actors.messages import (
    ComputeBlock,
    Message,
    OfferSpan,
    OfferTaken,
    Phase,
    PullSpan,
    SpanPulled,
    StoredParams,
)
from windlass.actors.worker_policy.stages import Stage
from windlass.engine.device.device import Device
from windlass.engine.device.tensor_arena import TensorArena
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.model.layout import UnsupportedArchitectureError
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ActorName, BlockIndex, JobId, Step

EMBEDDING, HEAD = BlockIndex(0), BlockIndex(2)
NUMEL, NUM_CHUNKS = 10_000, 5
NAME = "layers.0.weight"
JOB = JobId("ftjob-1")


def operation(phase: Phase, step: int, group: int = 0) -> ComputeBlock:
    in_head = phase in (Phase.HEAD, Phase.EVALUATE_HEAD)
    blocks = (HEAD, EMBEDDING) if in_head else (EMBEDDING,)
    return ComputeBlock(
        job=JOB,
        step=Step(step),
        op=step,
        phase=phase,
        block=blocks[0],
        params=tuple(StoredParams(block, Step(step - 1)) for block in blocks),
        group=group,
        loss_scale=1.0,
    )


@dataclass
class Boxes:
    """Three boxes: one with the embedding, one with a layer, and one with the head. The link copies at once."""

    ends: dict[ActorName, SharedParams] = field(default_factory=dict)
    arenas: list[torch.Tensor] = field(default_factory=list)
    offers: list[OfferSpan] = field(default_factory=list)  # all to other boxes
    pulls: list[PullSpan] = field(default_factory=list)  # those that wait
    slow: dict[ActorName, list[OfferSpan]] = field(default_factory=dict)  # GPU workers, with what they do not take yet
    num_more: int = 0  # bytes that a damaged offer has too many

    def end(self, box: int, rank: int = 0) -> SharedParams:
        return self.ends[gpu_worker_name(rank, box)]

    @property
    def lending(self) -> SharedParams:
        return self.end(0)

    @property
    def borrowing(self) -> SharedParams:
        return self.end(2)

    def send(self, to: ActorName, message: Message) -> None:
        if to in self.slow:
            assert isinstance(message, OfferSpan)
            self.slow[to].append(message)
        elif to in self.ends:
            assert isinstance(message, OfferSpan | OfferTaken)
            self.ends[to].take(message)
        elif isinstance(message, OfferSpan):
            self.offers.append(message)
        elif isinstance(message, PullSpan):
            self.pulls.append(message)
        for pull in list(self.pulls):
            for offer in self.offers:
                if offer.crossing == pull.crossing and pull in self.pulls:
                    self.pulls.remove(pull)
                    self.move(offer, pull)

    def move(self, offer: OfferSpan, pull: PullSpan) -> None:
        source = self.arenas[pull.box][offer.span.offset :][: offer.span.nbytes]
        self.arenas[offer.box][pull.span.offset :][: offer.span.nbytes].copy_(source)
        facts: dict[str, Any] = {"job": JOB, "step": offer.step, "crossing": offer.crossing}
        self.ends[offer.reply_to].take(OfferTaken(**facts))
        self.ends[pull.reply_to].take(
            SpanPulled(**facts, box=pull.box, nbytes=offer.span.nbytes + self.num_more, start_s=1.0, end_s=2.0)
        )


@contextmanager
def three_boxes(num_ranks: int = 1, deadline_s: float = 5.0) -> Iterator[Boxes]:
    layout = replace(
        make_layout(NUMEL, 2048, 2048),
        hidden_size=16,
        shared=((EMBEDDING,), (BlockIndex(1),), (HEAD, EMBEDDING)),
    )
    boxes = Boxes()
    with ExitStack() as stack:
        token = CancelToken(deadline_s)
        stack.callback(token.cancel)
        for box in range(3):
            stages = (Stage(0, 1), Stage(1, 2), Stage(2, 3))
            training = {"num_microbatches": num_ranks, "sequence_length": 8}
            spec = make_spec(training=training, stages=stages, box=box, num_ranks=num_ranks)
            context = make_context(spec, layout, "/arena")
            boxes.arenas.append(torch.zeros(context.plan.arena_nbytes, dtype=torch.uint8))
            arena = TensorArena(boxes.arenas[box])
            for rank, name in enumerate(context.gpu_workers):
                device = Device(torch.device("cpu"), token=token, start_threads=lambda _: None)
                boxes.ends[name] = SharedParams(context, device, arena, boxes.send, rank=rank, names=[NAME])
        yield boxes


def test_params_go_from_the_first_box_to_the_last_once_a_version() -> None:
    with three_boxes() as boxes:
        received = boxes.borrowing.params(EMBEDDING)
        assert received is not None
        for phase, head_phase, step, version in (
            (Phase.FORWARD, Phase.HEAD, 1, 0),
            (Phase.EVALUATE, Phase.EVALUATE_HEAD, 1, 1),
            (Phase.FORWARD, Phase.HEAD, 2, 1),  # the evaluation has had the same params
        ):
            boxes.borrowing.expect(operation(head_phase, step))
            for group in range(2):
                params = torch.full((NUMEL,), version + 1, dtype=torch.bfloat16)
                boxes.lending.send_params(operation(phase, step, group), params)
                boxes.borrowing.wait_for(operation(head_phase, step, group))
                assert (received == version + 1).all()
            assert [offer.box for offer in boxes.offers] == [2] * NUM_CHUNKS * (version + 1)
        assert not boxes.pulls


def test_gradient_of_the_last_box_comes_back_once_a_step() -> None:
    with three_boxes() as boxes:
        for step in (1, 2):
            boxes.lending.expect(operation(Phase.FORWARD, step))
            boxes.lending.expect(operation(Phase.EVALUATE, step))
            boxes.borrowing.send_sum(operation(Phase.HEAD, step), GradBuffer(torch.full((NUMEL,), float(step)), [NAME]))
            backward = operation(Phase.BACKWARD, step)
            boxes.lending.wait_for(backward)
            (received,) = boxes.lending.received_sums(backward)
            assert received.touched == {NAME}
            assert (received.flat == step).all()
        assert boxes.lending.received_sums(operation(Phase.FORWARD, 2)) == []


def test_params_cross_once_for_all_gpu_workers_and_their_slots_wait_for_the_slowest() -> None:
    slow = gpu_worker_name(2, 2)
    with three_boxes(num_ranks=3) as boxes:
        received = [boxes.end(2, rank).params(EMBEDDING) for rank in range(3)]
        for step in (1, 2):
            boxes.slow[slow] = []
            for rank in range(3):
                boxes.end(2, rank).expect(operation(Phase.HEAD, step, rank))
                boxes.end(0, rank).send_params(
                    operation(Phase.FORWARD, step, rank), torch.full((NUMEL,), step, dtype=torch.bfloat16)
                )
            waiting = boxes.slow.pop(slow)
            assert [offer.crossing.part for offer in waiting] == [0, 1]  # there are two slots
            for offer in waiting:
                boxes.ends[slow].take(offer)
            for rank, flat in enumerate(received):
                boxes.end(2, rank).wait_for(operation(Phase.HEAD, step, rank))
                assert flat is not None
                assert (flat == step).all()
            assert [(offer.box, offer.reply_to) for offer in boxes.offers] == [(2, "gpu-0")] * NUM_CHUNKS * step
        assert not boxes.pulls


def test_gradient_goes_between_the_gpu_workers_of_the_last_group() -> None:
    with three_boxes(num_ranks=3) as boxes:
        for step in (1, 2):
            for rank in range(3):
                boxes.end(0, rank).expect(operation(Phase.FORWARD, step, rank))
            total = GradBuffer(torch.full((NUMEL,), float(step)), [NAME])
            boxes.end(2, 2).send_sum(operation(Phase.HEAD, step, 2), total)
            for rank in range(3):
                backward = operation(Phase.BACKWARD, step, rank)
                boxes.end(0, rank).wait_for(backward)
                sums = boxes.end(0, rank).received_sums(backward)
                assert [(each.touched, each.flat.unique().tolist()) for each in sums] == [({NAME}, [step])] * (
                    rank == 2
                )
            assert [offer.reply_to for offer in boxes.offers] == ["b2/gpu-2"] * NUM_CHUNKS * step
        assert not boxes.pulls


def test_gpu_worker_that_does_not_pass_params_on_is_named() -> None:
    stuck = pytest.raises(TimeoutError, match="from box 0 in step 1; that box, the link to it or b2/gpu-0 is stuck")
    with three_boxes(num_ranks=2, deadline_s=0.1) as boxes, stuck:
        boxes.end(2, 1).wait_for(operation(Phase.HEAD, 1, 1))


def test_boxes_between_have_no_part_in_it() -> None:
    with three_boxes() as boxes:
        between = boxes.end(1)
        between.expect(operation(Phase.FORWARD, 1))
        between.send_params(operation(Phase.FORWARD, 1), torch.zeros(NUMEL))
        assert not between.takes(operation(Phase.BACKWARD, 1))
        assert between.params(EMBEDDING) is None
        assert boxes.offers == boxes.pulls == []
        assert boxes.lending.params(EMBEDDING) is None  # it has them itself


def test_chunk_of_another_size_is_refused() -> None:
    with three_boxes() as boxes:
        boxes.num_more = 2
        boxes.borrowing.expect(operation(Phase.HEAD, 1))
        with pytest.raises(ValueError, match=r"chunk 0 of the embedding from box 0 is .*: the boxes have other models"):
            boxes.lending.send_params(operation(Phase.FORWARD, 1), torch.zeros(NUMEL, dtype=torch.bfloat16))


def test_head_without_a_gradient_of_a_shared_param_is_refused() -> None:
    refused = pytest.raises(UnsupportedArchitectureError, match=r"no gradient of layers\.0\.weight")
    with three_boxes() as boxes, refused:
        boxes.borrowing.send_sum(operation(Phase.HEAD, 1), GradBuffer(torch.zeros(NUMEL)))
