"""A lane in one buffer beside a total in host memory: the bits of two buffers."""

import random

import pytest
import torch

from tests.unit.engine.pieces.test_grad_pieces import NAMES, Host, Layer, device
from windlass.engine.device import Device
from windlass.engine.lanes.lane_division import LaneDivision
from windlass.engine.model.grad_buffer import GradBuffer, LaneSums
from windlass.engine.pieces.beside_total import HostTotal, SumBesideTotal

__all__ = ["device"]


@pytest.mark.parametrize("part_numel", [1, 333, 10_000])
@pytest.mark.parametrize("seed", range(5))
def test_lanes_and_groups_have_bits_of_lanes_in_whole_buffers(device: Device, part_numel: int, seed: int) -> None:
    order, layer = random.Random(seed), Layer(device, torch.float32)
    places = {name: (offset, numel) for name, offset, numel in layer.params}
    num = order.randint(2, 5)
    division = LaneDivision(order.randint(2, num), num)
    size = order.choice([size for size in range(1, num + 1) if not division.num_open_lanes(size)])
    total, whole = None, layer.whole
    whole.lane = GradBuffer(torch.full((layer.numel,), torch.nan))
    num_there, num_read = order.randint(1, num), 0
    for first in range(0, num, size):
        buffer = GradBuffer(torch.full((layer.numel,), torch.nan))
        parts = [torch.empty(min(part_numel, layer.numel)) for _ in range(2)]
        between = Host(layer.numel, torch.float32)
        sums = SumBesideTotal(layer.buffers, buffer, parts, layer.params, total, between)
        for number in range(first, min(first + size, num_there)):
            lanes = LaneSums(whole, layer.params, is_first_lane=division.lane_of(number) == 0)
            sums.begin_microbatch(number)
            for name in order.sample(NAMES, order.randint(0, len(NAMES))):
                offset, numel = places[name]
                values = torch.randn(numel).to(torch.bfloat16)
                sums.add(name, offset, values)
                lanes.add(name, offset, values)
            if division.ends_lane(number):
                sums.end_lane()
                lanes.end_lane()
        sums.finish()
        home = Host(layer.numel, torch.float32)
        home.store(buffer.flat, 0)

        def note() -> None:
            nonlocal num_read
            num_read += 1

        total = HostTotal(home=home, touched=frozenset(buffer.touched), on_read=note)
    LaneSums(whole, layer.params, is_first_lane=False).end_lane()
    layer.buffers.h2d.record().wait()
    assert num_read == -(-num // size) - 1
    assert buffer.touched == whole.touched
    for grad in (buffer, whole):
        grad.finish(layer.params)
    assert torch.equal(buffer.flat, whole.flat)
