"""Partial gradient sums between accumulation groups: they return unchanged, in time, one operation's at a time."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.gpu_worker.grad_accumulation import PartialGrads
from windlass.actors.job.context import make_context
from windlass.actors.messages import ComputeBlock, Message, Phase, SpansReported, StoredParams
from windlass.actors.timeline.recorder import SpanRecorder
from windlass.actors.worker_policy.grad_sums import Use, leaving_sums
from windlass.engine.device.buffer_pool import DeviceBuffers
from windlass.engine.device.device import Device
from windlass.engine.device.streams import Stream
from windlass.engine.device.tensor_arena import TensorArena
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ActorName, BlockIndex, Step

# Three blocks of 1, 3 and 2 chunks; the head also uses the params of the first block.
NUMELS, HEAD = (2000, 5000, 3000), 2
GPU = ActorName("gpu-0")


class Bench:
    """The partial sums of a job with groups of one micro-batch."""

    def __init__(
        self, *, deadline_s: float = 10.0, device_blocks: tuple[int, ...] = (), num_ranks: int = 1, rank: int = 0
    ) -> None:
        placement = Placement(group_size=1, device_blocks=device_blocks)
        self.spec = make_spec(
            training={"num_microbatches": 3}, placement=placement, deadline_s=deadline_s, num_ranks=num_ranks
        )
        shared = ((BlockIndex(0),), (BlockIndex(1),), (BlockIndex(2), BlockIndex(0)))
        self.layout = replace(make_layout(*NUMELS), shared=shared)
        context = make_context(self.spec, self.layout, "/arena")
        memory = torch.zeros(context.plan.arena_nbytes, dtype=torch.uint8)
        self.told: list[Message] = []
        self.sent: list[tuple[ActorName, Message]] = []
        self.spans = SpanRecorder(GPU, self.spec.job, lambda to, message: self.told.append(message))
        self.token = CancelToken(deadline_s)
        device = Device(torch.device("cpu"), poison_released=True, token=self.token)
        planned = {(numel, dtype): 3 for numel in NUMELS for dtype in (torch.float32, torch.bfloat16)}
        flats = DeviceBuffers(device, planned, name="gradients")

        def take(use: Use, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
            return flats.take(numel, dtype, stream)

        self.partials = PartialGrads(context, device, take, TensorArena(memory), self.spans, self._send, rank=rank)
        self.thread = threading.Thread(target=self.partials.run, daemon=True)
        self.thread.start()

    def _send(self, to: ActorName, message: Message) -> None:
        self.sent.append((to, message))

    def operation(self, block: int, group: int) -> ComputeBlock:
        return ComputeBlock(
            job=self.spec.job,
            step=Step(1),
            op=100 * group + HEAD - block,
            phase=Phase.HEAD if block == HEAD else Phase.BACKWARD,
            block=BlockIndex(block),
            params=tuple(StoredParams(needed, Step(0)) for needed in self.layout.shared[block]),
            group=group,
            loss_scale=1.0,
        )

    def uses(self, operation: ComputeBlock) -> list[Use]:
        return leaving_sums(operation, self.spec.placement.device_blocks)

    def leave(self, block: int, group: int, dtype: torch.dtype = torch.float32) -> dict[int, torch.Tensor]:
        """Stores random sums for every use of an operation, and returns copies of them by block."""
        operation, found = self.operation(block, group), {}
        for use in self.uses(operation):
            flat = torch.randn(NUMELS[use[1]], dtype=dtype)
            found[int(use[1])] = flat.clone()
            self.partials.copy_out(operation, use, GradBuffer(flat, [f"{use[0]} in {use[1]}"]))
        return found

    def take(self, block: int, group: int) -> dict[int, GradBuffer]:
        operation = self.operation(block, group)
        return {int(use[1]): self.partials.take(operation, use) for use in self.uses(operation)}


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(**getattr(request, "param", {}))
    yield bench
    bench.token.cancel()
    bench.thread.join(60)
    assert not bench.thread.is_alive()


def test_sums_come_back_in_their_type_and_with_what_was_reached(bench: Bench) -> None:
    """Each use has its own slots, and all are stored at the same time."""
    left: dict[int, Any] = {
        block: bench.leave(block, 0, dtype)
        for block, dtype in ((2, torch.float32), (1, torch.bfloat16), (0, torch.float32))
    }
    for block in (2, 1, 0):
        bench.partials.expect(bench.operation(block, 1))
    for block in (2, 1, 0):
        found = bench.take(block, 1)
        assert found.keys() == left[block].keys()
        for owner, grad in found.items():
            assert grad.flat.dtype is left[block][owner].dtype
            assert torch.equal(grad.flat, left[block][owner])
            assert grad.touched == {f"{block} in {owner}"}


def test_one_operations_sums_are_back_at_a_time(bench: Bench) -> None:
    """Two at a time would use more device memory than planned."""
    for block in (2, 1):
        bench.leave(block, 0)
        bench.partials.expect(bench.operation(block, 1))
    head = bench.operation(2, 1)
    first, second = bench.uses(head)
    bench.partials.take(head, first)
    partials = bench.partials
    with partials._changed:
        assert not partials._changed.wait_for(lambda: (BlockIndex(1), BlockIndex(1)) in partials._back, 0.1)
    partials.take(head, second)
    assert bench.take(1, 1)[1].touched == {"1 in 1"}


def test_sum_expected_before_it_is_stored_returns_once_it_is_stored(bench: Bench) -> None:
    """Two groups ahead, each with a sum."""
    for group in (1, 2):
        bench.partials.expect(bench.operation(1, group))
    for group in (1, 2):
        left = bench.leave(1, group - 1)
        assert torch.equal(bench.take(1, group)[1].flat, left[1])


def test_copies_are_noted(bench: Bench) -> None:
    bench.leave(1, 0)
    bench.partials.expect(bench.operation(1, 1))
    bench.take(1, 1)
    bench.spans.tell(1)
    (told,) = bench.told
    assert isinstance(told, SpansReported)
    found = [(span.resource, str(span.kind), span.chunk, span.nbytes) for span in told.spans]
    nbytes = (8192, 8192, 4 * (5000 - 2 * 2048))
    assert found == [
        (f"gpu-0/{way}", f"copy_partial_{name}", chunk, nbytes[chunk])
        for way, name in (("d2h", "out"), ("h2d", "in"))
        for chunk in range(3)
    ]


@pytest.mark.parametrize("bench", [{"device_blocks": (0, 1)}], indirect=True)
def test_sums_on_the_device_are_not_here(bench: Bench) -> None:
    assert [bench.uses(bench.operation(block, 1)) for block in (0, 1, 2)] == [[], [], [(2, 2)]]
    bench.partials.expect(bench.operation(1, 1))  # there is nothing to wait for
    left = bench.leave(2, 0)
    bench.partials.expect(bench.operation(2, 1))
    assert torch.equal(bench.take(2, 1)[2].flat, left[2])


def test_a_first_group_and_a_forward_pass_expect_nothing(bench: Bench) -> None:
    left = bench.leave(1, 0)
    bench.partials.expect(bench.operation(2, 0))
    bench.partials.expect(replace(bench.operation(0, 1), phase=Phase.FORWARD))
    bench.partials.expect(bench.operation(1, 1))
    assert torch.equal(bench.take(1, 1)[1].flat, left[1])


@pytest.mark.parametrize("bench", [{"deadline_s": 0.1}], indirect=True)
def test_a_sum_that_does_not_come_back_is_an_error(bench: Bench) -> None:
    bench.partials.expect(bench.operation(1, 2))
    message = "the gradient of block 1 in step 1, as group 1 of its micro-batches left it, to come back"
    with pytest.raises(TimeoutError, match=f"waited 0.1 s for {message} to the device; the copies from and to host"):
        bench.take(1, 2)


@pytest.mark.parametrize("bench", [{"deadline_s": 0.1, "num_ranks": 3, "rank": 1}], indirect=True)
def test_error_names_the_gpu_worker_that_does_not_pass_a_sum_on_or_does_not_take_it(bench: Bench) -> None:
    bench.partials.expect(bench.operation(1, 1))
    with pytest.raises(TimeoutError, match="to come back to the device; gpu-0 has not left it, or the copies from"):
        bench.take(1, 1)
    with pytest.raises(TimeoutError, match=r"of pool slots of sums that gpu-2 has not taken: \d of \d are in use"):
        list(map(bench.leave, (2, 1, 0), (1, 1, 1)))


def test_stopping_ends_the_wait_for_a_sum(bench: Bench) -> None:
    timer = threading.Timer(0.05, bench.token.cancel)
    timer.start()
    with pytest.raises(InterruptedError):
        bench.take(1, 1)
    timer.join()
