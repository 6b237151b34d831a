"""Update orders in the real engine, by block and by chunk: all give the same numbers."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.schedules import System, behaving_as
from tests.support.training import has_direct_io, leftovers_of, losses_of, make_partition, make_spec
from windlass.actors.job.context import optimizer_name
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import (
    BlockUpdated,
    ComputeBlocks,
    ComputeProgressed,
    Message,
    Phase,
    ReadChunks,
    UpdateStep,
)
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.worker_policy.block_queue import Ordering, QueueOrder
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.storage.ids import ActorName, Precision

NUM_STEPS = 4
FIFO = QueueOrder.FIFO
ORDERINGS = {
    "priority": Ordering(),
    "fifo": Ordering(queues=FIFO),
    "steps-alone": Ordering(overlaps_steps=False),
    "fifo-steps-alone": Ordering(queues=FIFO, overlaps_steps=False),
    "one-of-each": Ordering(max_prefetched=1, max_offloading=1, max_updating=1, max_flushing=1),
    "many-of-each": Ordering(max_prefetched=4, max_offloading=5, max_updating=5, max_flushing=5),
}


def small_job(root: Path, **changes: Any) -> JobSpec:
    """A job of five blocks whose layers have five chunks each."""
    options: dict[str, Any] = {"total_steps": NUM_STEPS, "evaluate_every": None, "num_validation_examples": 0}
    return make_spec(root, precision=Precision.BF16, **(options | changes))


def train(spec: JobSpec) -> list[tuple[ActorName, Message]]:
    """Trains, and returns every message with its receiver."""
    messages: list[tuple[ActorName, Message]] = []
    outcome = run_local(
        spec,
        partition=make_partition(spec),
        poison_released=True,
        direct=has_direct_io(Path(spec.job_dir)),
        on_message=lambda to, message: messages.append((to, message)),
    )
    assert outcome["status"] == "succeeded", outcome
    assert leftovers_of(spec) == []
    return messages


def updates_in_order(messages: list[tuple[ActorName, Message]]) -> list[tuple[int, int]]:
    """(step, block) of the updates."""
    return [(m.step, m.block) for _, m in messages if isinstance(m, BlockUpdated)]


def read_in_order(messages: list[tuple[ActorName, Message]]) -> list[tuple[int, int]]:
    """(step, block) of the updates, in the order in which the first optimizer begins to read states for them."""
    reads = [m for _, m in messages if isinstance(m, ReadChunks) and m.reply_to == optimizer_name(0)]
    blocks = [(m.step + 1, item.key.block) for m in reads for item in m.items if m.step < NUM_STEPS]
    return list(dict.fromkeys(blocks))


def assert_steps_do_not_overlap(messages: list[tuple[ActorName, Message]], num_blocks: int) -> None:
    num_updated = dict.fromkeys(range(NUM_STEPS + 1), 0) | {0: num_blocks}
    for _, message in messages:
        if isinstance(message, BlockUpdated):
            num_updated[message.step] += 1
        elif isinstance(message, ComputeBlocks):
            for operation in message.operations:
                is_training = operation.phase in (Phase.FORWARD, Phase.HEAD, Phase.BACKWARD)
                assert not is_training or num_updated[operation.step - 1] == num_blocks, (
                    "a step began beside updates of the one before"
                )


@pytest.fixture(scope="module")
def expected_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[float | None, list[float]]:
    """The losses, by clipping norm."""
    found = {}
    for clip_norm in (None, 0.5):
        spec = small_job(tmp_path_factory.mktemp("plain") / "job", clip_norm=clip_norm)
        train(spec)
        found[clip_norm] = losses_of(spec)
    return found


@pytest.mark.short("priority-None", "fifo-steps-alone-None")
@pytest.mark.parametrize("clip_norm", [None, pytest.param(0.5, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ORDERINGS)
def test_orders_change_no_number(
    tmp_path: Path, name: str, clip_norm: float | None, expected_losses: dict[float | None, list[float]]
) -> None:
    ordering = ORDERINGS[name]
    spec = small_job(tmp_path / "job", clip_norm=clip_norm, ordering=ordering)
    messages = train(spec)
    assert losses_of(spec) == expected_losses[clip_norm]
    updates = updates_in_order(messages)
    num_blocks = len(make_partition(spec).layout.blocks)
    assert len(updates) == len(set(updates)) == NUM_STEPS * num_blocks
    if ordering.queues is FIFO:
        assert read_in_order(messages) == [
            (grad.step, grad.block) for _, m in messages if isinstance(m, ComputeProgressed) for grad in m.grads
        ]
    if not ordering.overlaps_steps:
        assert_steps_do_not_overlap(messages, num_blocks)


@pytest.mark.short("priority")
@pytest.mark.parametrize("queues", list(QueueOrder))
def test_chunks_are_read_in_the_order_of_their_blocks(tmp_path: Path, queues: QueueOrder) -> None:
    """An optimizer updates in the order of its requests: none overtakes another inside it."""
    spec = small_job(tmp_path / "job", ordering=Ordering(queues=queues, max_updating=1))
    messages = train(spec)
    reads = [m for _, m in messages if isinstance(m, ReadChunks) and m.reply_to == optimizer_name(0)]
    chunks = [(m.step + 1, item.key) for m in reads for item in m.items if m.priority == (m.step + 1, item.key.block)]
    trained = [(step, key) for step, key in chunks if step <= NUM_STEPS]
    layout = make_partition(spec).layout
    assert [each for each, _ in groupby((step, key.block) for step, key in trained)] == updates_in_order(messages)
    for (_, block), keys in groupby(trained, lambda each: (each[0], each[1].block)):
        assert [key for _, key in keys] == layout.chunk_keys(block)


@pytest.mark.short("zero_infinity")
@pytest.mark.parametrize("system", list(System))
def test_another_systems_order_gives_the_same_numbers(
    tmp_path: Path, system: System, expected_losses: dict[float | None, list[float]]
) -> None:
    spec = small_job(tmp_path / "job", clip_norm=0.5, placement=Placement(host_activation_nbytes=16 << 20))
    num_blocks = len(make_partition(spec).layout.blocks)
    messages = train(behaving_as(spec, system, num_blocks))
    assert losses_of(spec) == expected_losses[0.5]
    assert_steps_do_not_overlap(messages, num_blocks)
    turns = [type(m) for _, m in messages if isinstance(m, ComputeBlocks | UpdateStep)]
    assert [kind for kind, _ in groupby(turns)] == [ComputeBlocks, UpdateStep] * NUM_STEPS


def test_updates_after_the_backward_pass_are_those_of_separate_steps(tmp_path: Path) -> None:
    """The job's update order decides, whatever its queue ordering is."""
    spec = small_job(tmp_path / "job", update_order=UpdateOrder.AFTER_BACKWARD)
    assert spec.ordering.overlaps_steps
    assert spec.effective_ordering == replace(spec.ordering, overlaps_steps=False)
    assert_steps_do_not_overlap(train(spec), len(make_partition(spec).layout.blocks))
