"""Gradients in pieces: whatever comes in which order, host memory has the bits of one buffer for the whole layer."""

import random
from collections.abc import Iterator

import pytest
import torch

from windlass.engine.device import Device, Event
from windlass.engine.memory_plan.param_slices import NORM_ROW_NUMEL, cut_layers, grad_piece_numels
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.optimizer.grad_norm import squared_norm
from windlass.engine.pieces.grad_pieces import GradPieceBuffers, PieceSums, StreamedGrad
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

    def __init__(self, device: Device, dtype: torch.dtype, *, num_pieces: int = 2) -> None:
        numels = [numel for module in MODULES for numel in module] + list(SMALL)
        offsets = [sum(numels[:i]) for i in range(len(numels))]
        self.params = list(zip(NAMES, offsets, numels, strict=True))
        self.numel, self.dtype, self.device = sum(numels), dtype, device
        (self.cuts,) = cut_layers([MODULES])
        pieces, rests = grad_piece_numels([self.cuts], [self.numel], is_summed=True)
        flats = [[torch.empty(n, dtype=dtype) for n in numels] for numels in (pieces[:num_pieces], rests)]
        self.buffers = GradPieceBuffers(device, *flats)
        self.sums = PieceSums()
        self.whole = GradBuffer(torch.full((self.numel,), torch.nan, dtype=dtype))

    def begin(self, home: Host, *, is_complete: bool) -> StreamedGrad:
        bounds = (*self.cuts, self.numel)
        grad = StreamedGrad(self.buffers, bounds, self.params, self.sums, home, is_complete=is_complete)
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
