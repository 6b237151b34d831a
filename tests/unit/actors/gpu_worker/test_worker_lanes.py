"""One rank computes all lanes of a step: the bits are those of lanes that are computed alone and added at the end."""

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actors.worker_bench import Bench, running
from tests.support.engine.lane_oracle import LaneOracle
from tests.support.training import make_partition
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.lanes.lane_division import LaneDivision
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.optimizer.grad_norm import portable_squared_norm
from windlass.storage.ids import BlockIndex, Precision

# Micro-batches of one example. With two lanes, the second one has three of them.
NUM_MICROBATCHES = 5
QUICK = [
    (Precision.BF16, True, 2, 2, 2),
    (Precision.FP32, True, 3, 1, 1),
    (Precision.FP16, False, 4, None, 2),
]
ALL = list(product(Precision, (False, True), (1, 2, 3, 4, 5), (None, 1, 2, 3, 4), (1, 2)))


def cases() -> list[Any]:
    def case(precision: Precision, tied: bool, lanes: int, group_size: int | None, num_buffers: int) -> Any:
        params = (precision, tied, lanes, group_size, num_buffers)
        tying = "tied" if tied else "own"
        name = f"{precision}-{tying}-{lanes}-lanes-groups-of-{group_size or 'all'}-{num_buffers}-buffers"
        return pytest.param(*params, id=name, marks=() if params in QUICK else pytest.mark.long)

    return [case(*params) for params in ALL]


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize(("precision", "tied", "lanes", "group_size", "num_buffers"), cases())
def test_gradients_of_all_lanes_are_those_of_lanes_computed_alone(
    tmp_path: Path, precision: Precision, tied: bool, lanes: int, group_size: int | None, num_buffers: int
) -> None:
    check_gradients(make_bench(tmp_path, precision, tied, lanes, group_size, num_buffers))


@pytest.mark.parametrize(
    ("num_present", "lanes", "group_size"),
    [
        (4, 2, 3),  # the cut lane goes on in the last group, and lacks its last micro-batch
        (3, 2, 3),  # the cut lane has nothing in the last group
        (2, 3, 2),  # the same, and the lane after it has nothing at all
        (4, 3, 2),  # each cut is in another lane, and the last group is empty
    ],
)
def test_gradients_of_a_short_step_whose_groups_cut_a_later_lane_are_those_of_lanes_computed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_present: int, lanes: int, group_size: int
) -> None:
    """The last step of an epoch may have fewer micro-batches than the others."""
    batch = PreparedDataset.batch
    monkeypatch.setattr(PreparedDataset, "batch", lambda *arguments: batch(*arguments)[:num_present])
    division = LaneDivision(lanes, NUM_MICROBATCHES)
    assert any(map(division.has_open_lane, range(group_size, num_present + 1, group_size)))
    check_gradients(make_bench(tmp_path, Precision.BF16, True, lanes, group_size, 2))


def make_bench(
    directory: Path, precision: Precision, tied: bool, lanes: int, group_size: int | None, num_buffers: int
) -> Bench:
    bench = Bench(
        directory,
        precision=precision,
        tied=tied,
        dropout=0.1,
        batch_size=NUM_MICROBATCHES,
        num_microbatches=NUM_MICROBATCHES,
        lanes=lanes,
        placement=Placement(group_size=group_size, num_grad_buffers=num_buffers),
    )
    bench.loss_scale = 256.0 if precision is Precision.FP16 else 1.0
    return bench


def check_gradients(bench: Bench) -> None:
    hyper = bench.spec.training
    dataset = PreparedDataset.open(bench.spec.dataset_dir, "train")
    batch = dataset.batch(0, hyper.batch_size, hyper.num_microbatches, hyper.seed)
    torch.set_num_threads(bench.spec.compute_threads)  # fp32 products of other numbers of threads have other bits
    oracle = LaneOracle(make_partition(bench.spec), bench.model, hyper.seed, step=1, loss_scale=bench.loss_scale)
    expected = oracle.gradients(batch, num_lanes=hyper.lanes, num_microbatches=NUM_MICROBATCHES)
    with running(bench):
        found = bench.train_step()
    assert [block for block, grad in found.items() if not torch.equal(grad, expected[block])] == []
    assert set(found) == set(expected)
    for grad in bench.grads:
        keys = bench.layout.chunk_keys(BlockIndex(grad.block))
        chunks = [expected[grad.block][slice(*bench.layout.chunk_range(key))] for key in keys]
        squares = math.fsum(float(chunk.double().square().sum()) for chunk in chunks)
        assert sum(grad.sq_sums) == pytest.approx(squares, rel=1e-6)
        if hyper.lanes > 1:
            assert grad.sq_sums == tuple(float(portable_squared_norm(chunk)) for chunk in chunks)
        else:
            assert len(grad.sq_sums) == 1
