"""Gradients in pieces: whatever comes in which order, host memory has the bits of one buffer for the whole layer."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from windlass.engine.device import Device, Event
from windlass.engine.lanes.lane_division import LaneDivision
from windlass.engine.memory_plan.buffer_counts import NUM_GATHERED_CHUNKS
from windlass.engine.memory_plan.param_slices import NORM_ROW_NUMEL, cut_layers, grad_piece_numels
from windlass.engine.model.grad_buffer import GradBuffer, LaneSums
from windlass.engine.optimizer.grad_norm import portable_squared_norms, squared_norm
from windlass.engine.pieces.chunk_norms import ChunkNorms
from windlass.engine.pieces.grad_pieces import (
    GradPieceBuffers,
    PieceLanes,
    PieceSums,
    RoundedSums,
    SecondGradientError,
    StreamedGrad,
)
from windlass.storage.cancellation import CancelToken

# Modules of a layer, each with its matrices; then norms and biases.
MODULES = ((700,), (300, 500), (1500,), (900, 600))
SMALL = (11, 40)
NAMES = [f"m{i}" for i in range(sum(map(len, MODULES)) + len(SMALL))]


class Host:
    """A GradHome that notes which pieces move."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.flat = torch.full((numel,), torch.nan, dtype=dtype)
        self.stored: list[int] = []
        self.loaded: list[int] = []

    def store(self, source: torch.Tensor, start: int) -> None:
        self.stored.append(start)
        self.flat[start : start + source.numel()].copy_(source)

    def load(self, target: torch.Tensor, start: int) -> None:
        self.loaded.append(start)
        target.copy_(self.flat[start : start + target.numel()])

    def moved(self, begun: Event, ended: Event, nbytes: int, *, is_out: bool) -> None:
        pass


@pytest.fixture
def device() -> Iterator[Device]:
    token = CancelToken(30.0)
    yield Device(torch.device("cpu"), poison_released=True, token=token)
    token.cancel()


class Layer:
    """A layer, its gradient in one buffer, and the same gradient in pieces."""

    def __init__(
        self, device: Device, dtype: torch.dtype, *, num_pieces: int = 2, modules: Sequence[Sequence[int]] = MODULES
    ) -> None:
        numels = [numel for module in modules for numel in module] + list(SMALL)
        offsets = [sum(numels[:i]) for i in range(len(numels))]
        self.names = [f"m{i}" for i in range(len(numels))]
        self.params = list(zip(self.names, offsets, numels, strict=True))
        self.numel, self.dtype, self.device = sum(numels), dtype, device
        (self.cuts,) = cut_layers([modules])
        pieces, rests = grad_piece_numels([self.cuts], [self.numel], is_summed=True)
        flats = [[torch.empty(n, dtype=dtype) for n in numels] for numels in (pieces[:num_pieces], rests)]
        self.buffers = GradPieceBuffers(device, *flats)
        self.sums = PieceSums()
        self.whole = GradBuffer(torch.full((self.numel,), torch.nan, dtype=dtype))

    def begin(self, home: Host, *, is_complete: bool, **options: Any) -> StreamedGrad:
        bounds = (*self.cuts, self.numel)
        grad = StreamedGrad(self.buffers, bounds, self.params, self.sums, home, is_complete=is_complete, **options)
        grad.begin()
        return grad


def run(layer: Layer, groups: list[list[list[str]]]) -> tuple[Host, torch.Tensor]:
    """Adds the same gradients in both ways. `groups`: for each group and micro-batch, the names in their order."""
    partial, complete = (Host(layer.numel, layer.dtype) for _ in range(2))
    places = {name: (offset, numel) for name, offset, numel in layer.params}
    for i, group in enumerate(groups):
        is_last = i + 1 == len(groups)
        grad = layer.begin(complete if is_last else partial, is_complete=is_last)
        for microbatch in group:
            for name in microbatch:
                offset, numel = places[name]
                values = torch.randn(numel).to(layer.dtype)
                layer.whole.add(name, offset, values)
                grad.add(name, offset, values)
        grad.end()
    layer.whole.finish(layer.params)
    layer.buffers.d2h.record().wait()
    assert grad.norm is not None
    return complete, grad.norm.total()


def assert_same(layer: Layer, host: Host, norm: torch.Tensor) -> None:
    assert torch.equal(host.flat, layer.whole.flat)
    assert torch.equal(norm, squared_norm(layer.whole.flat))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_pieces", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_any_order_over_micro_batches_and_groups_gives_bits_of_one_buffer(
    device: Device, dtype: torch.dtype, num_pieces: int, seed: int
) -> None:
    order = random.Random(seed)
    layer = Layer(device, dtype, num_pieces=num_pieces)
    groups = [
        [order.sample(NAMES, order.randint(0, len(NAMES))) for _ in range(order.randint(0, 3))]
        for _ in range(order.randint(1, 3))
    ]
    assert_same(layer, *run(layer, groups))


def test_backward_order_moves_each_piece_once(device: Device) -> None:
    layer = Layer(device, torch.float32)
    host, norm = run(layer, [[NAMES[::-1]]])
    assert_same(layer, host, norm)
    assert not host.loaded
    assert sorted(host.stored) == sorted(layer.cuts)


def test_sums_of_the_next_group_come_in_once_and_go_out_once(device: Device) -> None:
    layer = Layer(device, torch.float32, num_pieces=3)
    partial, complete = (Host(layer.numel, layer.dtype) for _ in range(2))
    places = {name: (offset, numel) for name, offset, numel in layer.params}
    for home, is_complete in ((partial, False), (complete, True)):
        grad = layer.begin(home, is_complete=is_complete)
        for name in NAMES[::-1]:
            grad.add(name, places[name][0], torch.ones(places[name][1]))
        grad.end()
    layer.buffers.d2h.record().wait()
    assert sorted(partial.stored) == sorted(partial.loaded) == sorted(complete.stored) == sorted(layer.cuts)
    assert not complete.loaded
    assert (complete.flat == 2).all()


def test_a_layer_that_no_micro_batch_reaches_is_zero(device: Device) -> None:
    layer = Layer(device, torch.float32)
    host, norm = run(layer, [[]])
    assert not host.flat.any()
    assert norm == 0


def test_buffers_take_the_memory_of_two_pieces_and_the_rest(device: Device) -> None:
    pieces, rests = grad_piece_numels([(0, 60, 100), (0, 70)], [110, 90], is_summed=False)
    assert [numel - NORM_ROW_NUMEL for numel in pieces] == [70, 70]
    assert [numel - NORM_ROW_NUMEL for numel in rests] == [20, 20]
    assert len(grad_piece_numels([(0, 60)], [60], is_summed=True)[0]) == 3


CHUNK = 1000  # no multiple of a piece


def run_in_lanes(
    layer: Layer,
    division: LaneDivision,
    group_size: int,
    micro_batches: list[list[str]],
    chunk_numel: int = CHUNK,
) -> tuple[list[Host], StreamedGrad]:
    """Adds the same gradients in pieces and in buffers of whole lanes.

    `micro_batches`: the names that each reaches, in their order. The last ones of a full step may be missing. Returns
    the homes of all groups, and the last group's gradient.
    """
    places = {name: (offset, numel) for name, offset, numel in layer.params}
    homes: list[Host] = []
    for first in range(0, division.num_microbatches, group_size):
        stop = min(first + group_size, division.num_microbatches)
        lane_home = Host(layer.numel, layer.dtype) if division.has_long_lane else None
        lanes = PieceLanes(division=division, last=division.lane_of(stop - 1), home=lane_home, chunk_numel=chunk_numel)
        homes.append(Host(layer.numel, layer.dtype))
        grad = layer.begin(homes[-1], is_complete=stop == division.num_microbatches, lanes=lanes)
        for number in range(first, min(stop, len(micro_batches))):
            if division.lane_of(number) > 0 and layer.whole.lane is None:
                layer.whole.lane = GradBuffer(torch.full((layer.numel,), torch.nan, dtype=layer.dtype))
            sums = LaneSums(layer.whole, layer.params, is_first_lane=division.lane_of(number) == 0)
            grad.begin_microbatch(number)
            for name in micro_batches[number]:
                offset, numel = places[name]
                values = torch.randn(numel).to(torch.bfloat16)
                sums.add(name, offset, values)
                grad.add(name, offset, values)
            if division.ends_lane(number):
                sums.end_lane()
                grad.end_lane()
        grad.end()
    if layer.whole.lane is not None:  # the last lane may lack micro-batches
        LaneSums(layer.whole, layer.params, is_first_lane=False).end_lane()
    layer.whole.finish(layer.params)
    layer.buffers.d2h.record().wait()
    return homes, grad


@pytest.mark.parametrize("num_pieces", [2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_lanes_in_any_order_have_bits_of_lanes_in_whole_buffers(device: Device, num_pieces: int, seed: int) -> None:
    order = random.Random(seed)
    num = order.randint(2, 6)
    division = LaneDivision(order.randint(2, num), num)
    sizes = [size for size in range(1, num + 1) if not division.num_open_lanes(size)]
    layer = Layer(device, torch.float32, num_pieces=num_pieces)
    reached = [order.sample(NAMES, order.randint(0, len(NAMES))) for _ in range(order.randint(1, num))]
    homes, grad = run_in_lanes(layer, division, order.choice(sizes), reached)
    assert grad.norms is not None
    assert torch.equal(homes[-1].flat, layer.whole.flat)
    norms = portable_squared_norms(layer.whole.flat, CHUNK)
    assert torch.equal(torch.stack(grad.norms.total()), torch.stack(norms))


@pytest.mark.parametrize("chunk_numel", [100, 450, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_few_chunks_are_gathered_for_norms_whatever_tensors_are_left_out(
    device: Device, monkeypatch: pytest.MonkeyPatch, chunk_numel: int, seed: int
) -> None:
    gather, num_gathered = ChunkNorms._gather, []

    def count(self: ChunkNorms, chunk: int, part: torch.Tensor, start: int) -> None:
        num_gathered.append(len(self._gathered.keys() | {chunk}))
        gather(self, chunk, part, start)

    monkeypatch.setattr(ChunkNorms, "_gather", count)
    order, layer = random.Random(seed), Layer(device, torch.float32, num_pieces=3, modules=((160,),) * 20)
    left_out = set(order.sample(layer.names, order.randint(1, 12)))
    reached = [layer.names[::-1], [name for name in layer.names[::-1] if name not in left_out]]
    homes, grad = run_in_lanes(layer, LaneDivision(2, 4), 4, [*reached, *reached], chunk_numel=chunk_numel)
    assert max(num_gathered) <= NUM_GATHERED_CHUNKS
    assert torch.equal(homes[-1].flat, layer.whole.flat)
    assert grad.norms is not None
    norms = portable_squared_norms(layer.whole.flat, chunk_numel)
    assert torch.equal(torch.stack(grad.norms.total()), torch.stack(norms))


def test_a_lane_of_one_micro_batch_moves_each_piece_once_each_way(device: Device) -> None:
    layer = Layer(device, torch.float32, num_pieces=3)
    homes, _ = run_in_lanes(layer, LaneDivision(2, 2), 1, [NAMES[::-1], NAMES[::-1]])
    for home in homes:
        assert sorted(home.stored) == sorted(layer.cuts)
    assert sorted(homes[0].loaded) == sorted(layer.cuts)
    assert not homes[1].loaded
    assert torch.equal(homes[1].flat, layer.whole.flat)


@pytest.mark.parametrize("num_pieces", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_slices_of_a_micro_batch_add_up_as_in_whole_buffers(device: Device, num_pieces: int, seed: int) -> None:
    """Each slice reaches tensors again, in all lanes: also in a lane's only micro-batch."""
    order = random.Random(seed)
    num = order.randint(2, 4)
    division = LaneDivision(order.randint(1, num), num)
    layer = Layer(device, torch.float32, num_pieces=num_pieces)
    places = {name: (offset, numel) for name, offset, numel in layer.params}
    home, lane_home = (Host(layer.numel, layer.dtype) for _ in range(2))
    lanes = None
    if division.num_lanes > 1:
        lanes = PieceLanes(division=division, last=division.num_lanes - 1, home=lane_home, chunk_numel=CHUNK)
    grad = layer.begin(home, is_complete=True, lanes=lanes)
    for number in range(num):
        lane = division.lane_of(number)
        if lane > 0 and layer.whole.lane is None:
            layer.whole.lane = GradBuffer(torch.full((layer.numel,), torch.nan))
        sums = LaneSums(layer.whole, layer.params, is_first_lane=lane == 0)
        grad.begin_microbatch(number)
        num_slices = order.randint(1, 3)
        for index in range(num_slices):
            grad.begin_slice(is_last=index + 1 == num_slices)
            for name in order.choice([NAMES[::-1], order.sample(NAMES, order.randint(0, len(NAMES)))]):
                offset, numel = places[name]
                values = torch.randn(numel)
                sums.add(name, offset, values)
                grad.add(name, offset, values)
        if division.num_lanes > 1 and division.ends_lane(number):
            sums.end_lane()
            grad.end_lane()
    grad.end()
    layer.whole.finish(layer.params)
    layer.buffers.d2h.record().wait()
    assert torch.equal(home.flat, layer.whole.flat)
    if grad.norms is not None:
        expected = torch.stack(portable_squared_norms(layer.whole.flat, CHUNK))
        assert torch.equal(torch.stack(grad.norms.total()), expected)
    else:
        assert grad.norm is not None
        assert torch.equal(grad.norm.total(), squared_norm(layer.whole.flat))


@pytest.mark.parametrize("num_pieces", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_sums_of_slices_leave_in_fp32_and_are_rounded_once(device: Device, num_pieces: int, seed: int) -> None:
    """A small step lacks the last micro-batch. In some slices the order is another, or tensors are missing."""
    order = random.Random(seed)
    num, last = order.randint(1, 3), order.randint(2, 3)
    layer = Layer(device, torch.float32, num_pieces=num_pieces)
    places = {name: (offset, numel) for name, offset, numel in layer.params}
    home, between = Host(layer.numel, torch.bfloat16), Host(layer.numel, torch.float32)
    rounded = RoundedSums(between=between, last_microbatch=last - 1, dtype=torch.bfloat16)
    grad = layer.begin(home, is_complete=True, rounded=rounded)
    for number in range(min(num, last)):
        grad.begin_microbatch(number)
        num_slices = order.randint(1, 3)
        for index in range(num_slices):
            grad.begin_slice(is_last=index + 1 == num_slices)
            for name in order.choice([NAMES[::-1], NAMES[::-1], order.sample(NAMES, order.randint(0, len(NAMES)))]):
                offset, numel = places[name]
                values = torch.randn(numel)
                layer.whole.add(name, offset, values)
                grad.add(name, offset, values)
    grad.end()
    layer.whole.finish(layer.params)
    layer.buffers.d2h.record().wait()
    expected = layer.whole.flat.bfloat16()
    assert torch.equal(home.flat, expected)
    assert (sorted(home.stored), home.loaded) == (sorted(layer.cuts), [])
    assert grad.norm is not None
    assert torch.equal(grad.norm.total(), squared_norm(expected))


def test_pieces_of_the_last_slice_leave_when_they_are_complete(device: Device) -> None:
    layer = Layer(device, torch.float32, num_pieces=3)
    home, between = Host(layer.numel, torch.bfloat16), Host(layer.numel, torch.float32)
    rounded = RoundedSums(between=between, last_microbatch=0, dtype=torch.bfloat16)
    grad = layer.begin(home, is_complete=True, rounded=rounded)
    grad.begin_microbatch(0)
    for is_last in (False, True):
        grad.begin_slice(is_last=is_last)
        for name, offset, numel in reversed(layer.params):
            grad.add(name, offset, torch.ones(numel))
    layer.buffers.d2h.record().wait()
    assert sorted(home.stored) == sorted(between.stored) == sorted(between.loaded) == sorted(layer.cuts)
    with pytest.raises(SecondGradientError, match=r"m3 gets two gradients .* bits\. Give the job"):
        grad.add(*layer.params[3][:2], torch.ones(layer.params[3][2]))


def test_a_second_gradient_after_the_lane_was_added_is_refused(device: Device) -> None:
    with pytest.raises(SecondGradientError, match=r"m3 gets two gradients in one micro-batch\. .* Train with lanes=1"):
        run_in_lanes(Layer(device, torch.float32), LaneDivision(2, 2), 2, [["m3"], ["m3", "m3"]])
