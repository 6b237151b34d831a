"""A move's division of blocks, and its order of chunks."""

import dataclasses
import random
from collections import deque
from pathlib import Path

import pytest

from tests.support.actors.moving_job import ONE_BOX, MovingJob
from tests.support.actors.stage_runs import STAGES
from windlass.actors.runtime.moving.division import ChunkMove, blocks_text
from windlass.actors.worker_policy.stages import Stage

DIVISIONS = {"one": ONE_BOX, **STAGES}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> MovingJob:
    return MovingJob.make(Path(tmp_path_factory.mktemp("division")) / "job")


@pytest.mark.parametrize("before", DIVISIONS)
@pytest.mark.parametrize("after", DIVISIONS)
def test_all_chunks_move_once_and_one_slot_each_way_is_enough(job: MovingJob, before: str, after: str) -> None:
    job.stages = DIVISIONS[before]
    specs = job.moves(DIVISIONS[after])
    orders = [spec.chunks(job.layout) for spec in specs]
    assert all(order == orders[0] for order in orders)
    keys = [key for block in job.layout.blocks for key in job.layout.chunk_keys(block.index)]
    assert sorted(each.key for each in orders[0]) == keys
    carry_out(orders[0], len(specs), random.Random(before + after))


def carry_out(order: list[ChunkMove], num_boxes: int, choose: random.Random) -> None:
    """Moves with one slot to offer and one to pull on each box, whatever is first when several can go on."""
    leaving = [deque(each for each in order if each.source == box != each.target) for box in range(num_boxes)]
    coming = [deque(each for each in order if each.target == box) for box in range(num_boxes)]
    while any(coming):
        ready = [
            box
            for box, chunks in enumerate(coming)
            if chunks and (chunks[0].source == box or leaving[chunks[0].source][0] == chunks[0])
        ]
        assert ready, "all boxes wait"
        chunk = coming[choose.choice(ready)].popleft()
        if chunk.source != chunk.target:
            leaving[chunk.source].popleft()
    assert not any(leaving)


def test_pairs_of_boxes_advance_alike(job: MovingJob) -> None:
    job.stages = ONE_BOX
    order = [each.target for each in job.moves(STAGES["2-1-2"])[0].chunks(job.layout)]
    half = order[: len(order) // 2]
    for target in range(3):
        assert abs(half.count(target) - order.count(target) / 2) <= 1


def test_boxes_that_know_another_division_have_another_digest(job: MovingJob) -> None:
    job.stages = ONE_BOX
    specs = job.moves(STAGES["2-3"])
    assert specs[0].digest(job.layout) == specs[1].digest(job.layout)
    others = job.moves(STAGES["1-4"])
    assert specs[0].digest(job.layout) != others[0].digest(job.layout)
    assert specs[0].digest(job.layout) != specs[0].digest(dataclasses.replace(job.layout, chunk_numel=2048))


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (Stage(0, 5), "the embedding, layers 1 to 3 and the head"),
        (Stage(0, 1), "the embedding"),
        (Stage(0, 2), "the embedding and layer 1"),
        (Stage(1, 4), "layers 1 to 3"),
        (Stage(3, 5), "layer 3 and the head"),
        (Stage(4, 5), "the head"),
    ],
)
def test_blocks_are_described_by_layers(stage: Stage, text: str) -> None:
    assert blocks_text(stage, 5) == text


def test_a_move_to_another_first_box_or_back_in_time_is_refused(job: MovingJob) -> None:
    job.stages = STAGES["2-3"]
    first, _ = job.moves(STAGES["1-4"])
    with pytest.raises(ValueError, match="stays the first one"):
        dataclasses.replace(first, owners=(None, Stage(0, 5)))
    with pytest.raises(ValueError, match="layout epoch 0 does not follow 0"):
        dataclasses.replace(first, epoch=0, new=first.old)
    with pytest.raises(ValueError, match="gets blocks in epoch 1, and the move is to 2"):
        dataclasses.replace(first, epoch=2)
