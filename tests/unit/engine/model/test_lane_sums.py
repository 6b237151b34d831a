"""Micro-batches are added to their lanes, and lanes to the total, tensor by tensor."""

import pytest
import torch

from tests.support.fake_fp32_product import FakeFp32Product
from windlass.engine.memory_estimate.live_storages import LiveStorageTracker
from windlass.engine.model import grad_buffer
from windlass.engine.model.grad_buffer import GradBuffer, LaneSums

# Name, offset and number of elements.
PARAMS = [("matrix", 0, 6), ("expert", 6, 2)]


def buffer(*touched: str) -> GradBuffer:
    return GradBuffer(torch.full((8,), torch.nan), touched)


def both() -> GradBuffer:
    total = buffer()
    total.lane = buffer()
    return total


def grad(value: float, numel: int) -> torch.Tensor:
    return torch.full((numel,), value)


def test_lanes_are_added_from_left_to_right() -> None:
    total, big = both(), 2.0**24
    sums = LaneSums(total, PARAMS, is_first_lane=True)
    for lane in ((big,), (1.0, 1.0), (0.5,)):
        for value in lane:
            sums.add("matrix", 0, grad(value, 6))
        sums.end_lane()
    # Beside a number so large, 1.0 would be lost, and 2.0 is not.
    assert total.flat[:6].tolist() == [big + 2.0] * 6
    assert total.touched == {"matrix"}


@pytest.mark.parametrize("in_fp32", [False, True])
def test_products_are_added_to_their_lane(in_fp32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    products = FakeFp32Product()
    products.install(monkeypatch)
    total = both()
    sums = LaneSums(total, PARAMS, is_first_lane=True)
    left, right = (torch.arange(3.0 * width, dtype=torch.bfloat16).view(3, width) for width in (2, 3))
    for _ in range(2):
        for _ in range(2):
            sums.add_product("matrix", 0, left, right, in_fp32=in_fp32)
        sums.end_lane()
    assert torch.equal(total.flat[:6].view(2, 3), 4 * (left.float().t() @ right.float()))
    assert products.num_products == 4 * in_fp32


def test_a_tensor_that_a_lane_does_not_reach_stays_as_it_is() -> None:
    total = both()
    sums = LaneSums(total, PARAMS, is_first_lane=True)
    sums.add("matrix", 0, grad(-0.0, 6))
    sums.end_lane()
    sums.add("expert", 6, grad(3.0, 2))  # the first lane had no token for it
    sums.end_lane()
    sums.end_lane()  # a lane without micro-batches
    assert total.touched == {"matrix", "expert"}
    assert torch.equal(total.flat[6:], grad(3.0, 2))
    assert torch.signbit(total.flat[:6]).all()  # zeros would have changed the sign


def test_a_lane_goes_on_where_the_group_before_has_left_it() -> None:
    total = GradBuffer(torch.ones(8), ["matrix"], GradBuffer(torch.full((8,), 2.0), ["matrix"]))
    sums = LaneSums(total, PARAMS, is_first_lane=False)
    sums.add("matrix", 0, grad(3.0, 6))
    assert torch.equal(total.flat, torch.ones(8))
    sums.end_lane()
    assert torch.equal(total.flat[:6], grad(6.0, 6))
    assert total.lane is not None
    assert total.lane.touched == set()


def test_the_first_lane_alone_needs_no_sum_beside_the_total() -> None:
    total = buffer()
    sums = LaneSums(total, PARAMS, is_first_lane=True)
    sums.add("matrix", 0, grad(1.0, 6))
    sums.end_lane()
    assert torch.equal(total.flat[:6], grad(1.0, 6))


@pytest.mark.parametrize("numel", [1, 99, 100, 101, 1000])
def test_a_cpu_adds_16_bit_gradients_in_parts_with_the_bits_of_one_addition(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_buffer, "ADDED_NUMEL", 100)
    sums, others = GradBuffer(torch.randn(numel + 7), ["w"]), torch.randn(7)
    sums.flat[numel:] = others
    before, added = sums.flat.clone(), torch.randn(numel).to(torch.bfloat16)
    living = LiveStorageTracker(torch.device("cpu"))
    living.begin()
    with living:
        sums.add("w", 0, added)
    assert torch.equal(sums.flat[:numel], before[:numel] + added)
    assert torch.equal(sums.flat[numel:], others)
    assert living.peak_nbytes == 4 * min(numel, 100)
