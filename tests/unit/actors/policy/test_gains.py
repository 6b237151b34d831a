"""The gain of an order of updates: the policy with resources of given speeds. No clock, no randomness."""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.policy.jobs import JOB, computed, grad_ready, make_shape
from windlass.actors.messages import (
    BlockUpdated,
    CommitStore,
    ComputeBlock,
    ComputeBlocks,
    ComputeProgressed,
    ExportModel,
    GradOffloaded,
    Message,
    ModelExported,
    Phase,
    StoreCommitted,
    UpdateStep,
)
from windlass.actors.policy.actions import Action, DecideCommit, EndStep
from windlass.actors.policy.scheduler_core import Pipeline
from windlass.actors.policy.trainer_state import TrainerState
from windlass.actors.worker_policy.block_queue import QueueOrder
from windlass.actors.worker_policy.worker_queues import OffloadQueue, UpdateActions, UpdateQueue
from windlass.engine.memory_plan.arena.choices import most_passing_blocks
from windlass.storage.ids import ActorName, BlockIndex, Step

NUM_BLOCKS = 42
NUM_STEPS = 12
NUM_DEVICE_GRADS = 2
GPU, LINK, OPTIMIZER = "gpu", "link", "optimizer"
# Seconds for a block: forward; backward with recomputation; offload. The step's compute takes 4 s a block.
FORWARD_S, BACKWARD_S, OFFLOAD_S = 1.0, 3.0, 0.2


# A gradient on its way out of the device, or an update: its step and block.
Key = tuple[Step, BlockIndex]


def keys_of(actions: UpdateActions) -> list[Key]:
    return [(update.step, update.block) for update in actions.begin]


class Timed:
    """Three resources, each of which executes its tasks in the order of the instructions.

    The optimizer executes a block as `num_chunks` chunks; with priority order, the most urgent block's chunks go first.
    `room`: number of blocks whose gradients fit into host memory; each chunk of one stays until it is updated.
    """

    def __init__(self, update_s: float, room: int, num_chunks: int = 4, **options: Any) -> None:
        options = {"total_steps": NUM_STEPS, "chunks_per_block": (1,) * NUM_BLOCKS, **options}
        self.pipeline = Pipeline(make_shape(**options), TrainerState(scales_loss=False), Step(0))
        self.update_s = update_s
        self.room = room
        self.num_chunks = num_chunks
        self.num_left: dict[int, int] = {}  # for the blocks in update
        self.now_s = 0.0
        self.events: list[tuple[float, int, list[Message], str]] = []
        self.waiting: dict[str, deque[ComputeBlock | Key]] = {name: deque() for name in (GPU, LINK, OPTIMIZER)}
        ordering = self.pipeline.config.ordering
        self.offloads = OffloadQueue(ordering, frozenset())
        self.updates = UpdateQueue(ordering.queues, ordering.max_updating, NUM_BLOCKS)
        self.busy: set[str] = set()
        self.num_device_grads = self.num_host_parts = 0
        self.numbers = itertools.count()

    def step_s(self) -> float:
        """The period of steps in the steady state."""
        ends = []
        self.take(self.pipeline.start(0.0))
        while self.events:
            self.now_s, _, events, resource = heapq.heappop(self.events)
            self.busy.discard(resource)
            self.num_device_grads -= resource == LINK
            self.num_host_parts -= resource == OPTIMIZER
            for event in events:
                if isinstance(event, ComputeProgressed):
                    self.note(event)
                    ends += [self.now_s for done in event.computed if done.phase is Phase.HEAD]
                self.take(self.pipeline.handle(event, self.now_s))
            self.pump()
        assert self.pipeline.committed == NUM_STEPS
        return (ends[-2] - ends[2]) / (len(ends) - 4)

    def note(self, event: ComputeProgressed) -> None:
        """Lets gradients leave the device in the GPU worker's order."""
        for done in event.computed:
            if done.phase in (Phase.HEAD, Phase.BACKWARD):
                self.waiting[LINK] += self.offloads.push(done.step, done.block)
        for grad in event.grads:
            self.waiting[LINK] += self.offloads.offload_finished()
            stored = GradOffloaded(job=JOB, step=grad.step, block=grad.block, chunks=())
            self.waiting[OPTIMIZER] += keys_of(self.updates.add(stored))

    def take(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, EndStep):
                continue
            if isinstance(action, DecideCommit):
                self.take(self.pipeline.commit_decided(action.step, self.now_s))
                continue
            match message := action.message:
                case ComputeBlocks():
                    self.waiting[GPU] += message.operations
                case UpdateStep():
                    self.waiting[OPTIMIZER] += keys_of(self.updates.add(message))
                case CommitStore():
                    answer = StoreCommitted(
                        job=JOB, step=message.step, actor=ActorName("ssd-0"), bytes_read=0, bytes_written=0
                    )
                    self.at(0.0, [answer], "")
                case ExportModel():
                    self.at(0.0, [ModelExported(job=JOB, step=message.step, actor=action.to, path=message.path)], "")
        self.pump()

    def at(self, in_s: float, events: list[Message], resource: str) -> None:
        self.busy.add(resource)
        heapq.heappush(self.events, (self.now_s + in_s, next(self.numbers), events, resource))

    def pump(self) -> None:
        """Starts all tasks that can start."""
        for name, waiting in self.waiting.items():
            if name not in self.busy and waiting and self.may_start(name, waiting[0]):
                if name == OPTIMIZER:
                    self.start_chunk(waiting)
                else:
                    self.start(waiting.popleft(), name)

    def may_start(self, resource: str, message: "ComputeBlock | Key") -> bool:
        if isinstance(message, ComputeBlock) and message.phase in (Phase.HEAD, Phase.BACKWARD):
            return self.num_device_grads < NUM_DEVICE_GRADS
        return resource != LINK or self.num_host_parts <= (self.room - 1) * self.num_chunks

    def start(self, message: "ComputeBlock | Key", resource: str) -> None:
        match message:
            case ComputeBlock(phase=phase):
                has_gradient = phase in (Phase.HEAD, Phase.BACKWARD)
                duration_s = {Phase.FORWARD: FORWARD_S, Phase.BACKWARD: BACKWARD_S}.get(phase, FORWARD_S + BACKWARD_S)
                self.num_device_grads += has_gradient
                self.at(duration_s, [computed(message)], resource)
            case (step, block):
                self.num_host_parts += self.num_chunks
                self.at(OFFLOAD_S, [grad_ready(step, block, 1.0)], resource)

    def start_chunk(self, waiting: "deque[ComputeBlock | Key]") -> None:
        updates = [update for update in waiting if isinstance(update, tuple)]
        in_order = self.pipeline.config.ordering.queues is QueueOrder.FIFO
        step, block = update = updates[0] if in_order else min(updates)
        left = self.num_left[block] = self.num_left.get(block, self.num_chunks) - 1
        done: list[Message] = []
        if left == 0:
            waiting.remove(update)
            waiting += keys_of(self.updates.updated(step))
            del self.num_left[block]
            done = [BlockUpdated(job=JOB, step=step, block=block, actor=ActorName("optimizer-0"))]
        self.at(self.update_s / self.num_chunks, done, OPTIMIZER)


COMPUTE_S = NUM_BLOCKS * (FORWARD_S + BACKWARD_S)


def step_s(over_compute: float, *, room: int = NUM_BLOCKS, **options: Any) -> float:
    """The step time of a job whose updates take `over_compute` times its compute."""
    return Timed(over_compute * COMPUTE_S / NUM_BLOCKS, room, **options).step_s()


def gain(over_compute: float, **options: Any) -> float:
    return step_s(over_compute, queues=QueueOrder.FIFO, **options) / step_s(over_compute, **options)


@pytest.mark.parametrize(("over_compute", "least"), [(1.0, 1.18), (1.25, 1.16), (1.5, 1.14)])
def test_priority_is_worth_most_of_a_forward_pass_where_the_optimizer_binds(over_compute: float, least: float) -> None:
    """In order of arrival, the first block is updated last, although the next forward pass begins with it."""
    most = (over_compute + 0.25) / over_compute
    assert least < gain(over_compute) < most


@pytest.mark.parametrize("over_compute", [0.1, 0.5, 1.0, 1.25, 1.5, 2.0, 4.0])
def test_steps_take_little_longer_than_the_busiest_resource_and_what_must_come_after_it(over_compute: float) -> None:
    """All blocks are updated between the first gradients of two steps, and the head goes forward and backward."""
    bound_s = max(COMPUTE_S, over_compute * COMPUTE_S + FORWARD_S + BACKWARD_S)
    assert bound_s <= step_s(over_compute) < 1.05 * bound_s


@pytest.mark.short("0.5-False", "1.0-True", "1.5-False", "4.0-True")
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("over_compute", [0.1, 0.5, 0.9, 1.0, 1.5, 2.0, 4.0])
def test_priority_never_loses(over_compute: float, clips: bool) -> None:
    assert gain(over_compute, keeps_grads=clips) > 0.999


@pytest.mark.parametrize("over_compute", [0.1, 0.5, 1.0, 1.5, 2.0])
def test_with_clipping_only_the_last_blocks_forward_pass_comes_after_the_updates(over_compute: float) -> None:
    backward_s = 0.75 * COMPUTE_S
    bound_s = max(COMPUTE_S, backward_s + over_compute * COMPUTE_S + FORWARD_S)
    assert bound_s <= step_s(over_compute, keeps_grads=True) < 1.05 * bound_s


def test_order_without_space_for_gradients_gains_nothing() -> None:
    """The backward pass waits for the updates, so each update is requested once its gradient arrives."""
    assert gain(1.25, room=2) < 1.03
    assert gain(1.25, room=NUM_BLOCKS // 2) > 1.15


@pytest.mark.short("True-0.75", "True-1.25", "False-1.0", "False-2.0")
@pytest.mark.parametrize("over_compute", [0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0])
@pytest.mark.parametrize("recomputes", [True, False])
def test_planned_space_for_gradients_is_enough_and_no_more(
    over_compute: float, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without recomputation, the forward pass is a third of the compute instead of a quarter."""
    if not recomputes:
        monkeypatch.setattr(f"{__name__}.BACKWARD_S", 2 * FORWARD_S)
        monkeypatch.setattr(f"{__name__}.COMPUTE_S", NUM_BLOCKS * 3 * FORWARD_S)
    room = most_passing_blocks(NUM_BLOCKS)
    planned = step_s(over_compute, room=room)
    assert planned == pytest.approx(step_s(over_compute, room=NUM_BLOCKS))
    if over_compute == 1.0 and not recomputes:
        assert step_s(over_compute, room=room - 2) > 1.01 * planned


@pytest.mark.long
def test_what_an_optimizer_has_been_given_is_overtaken_chunk_by_chunk() -> None:
    steps = [step_s(1.25, num_chunks=num) for num in (1, 2, 4, 8)]
    assert steps[-1] < steps[0]
    deeper = [step_s(1.25, max_updating=depth) for depth in (1, 2, 4, 8, 16, NUM_BLOCKS)]
    assert max(deeper) < 1.02 * min(deeper)


@pytest.mark.parametrize("queues", list(QueueOrder))
def test_steps_that_do_not_overlap_take_as_long_in_any_order(queues: QueueOrder) -> None:
    alone = step_s(1.25, overlaps_steps=False, queues=queues)
    assert alone == step_s(1.25, overlaps_steps=False)
    assert alone > step_s(1.25) * 1.15
