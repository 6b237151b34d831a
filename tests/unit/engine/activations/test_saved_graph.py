from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.engine.activation_runs import MemoryStore
from windlass.engine.activations.saved_graph import (
    BorrowedParams,
    ParamsNotLentError,
    SavedGraph,
    SavedTensorChangedError,
    keep_graph,
)
from windlass.engine.activations.saved_tensors import UnitSwaps
from windlass.engine.activations.selective_recompute import storage_ref
from windlass.engine.activations.store import SwapHandle
from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.storage.ids import BlockIndex

N = 8
BLOCK = BlockIndex(3)
KEEP = BlockActivations(recompute=False)
SWAP = BlockActivations(recompute=False, swap_input=True, swapped=frozenset({"*"}))

torch.manual_seed(0)
X, W, GRAD = torch.randn(3, N, N)


class Stage:
    """One weight in a flat buffer that is installed, removed and installed again elsewhere."""

    def __init__(self, policy: BlockActivations, store: MemoryStore | None = None) -> None:
        self.policy = policy
        self.store = store or MemoryStore()
        self.swaps = UnitSwaps(self.store)
        self.params = BorrowedParams()
        self.weight = self.lend()

    def lend(self) -> torch.Tensor:
        self.params.flats = {BLOCK: torch.cat([torch.zeros(5), W.flatten()])[1:]}
        return self.params.flats[BLOCK][4:].view(N, N).requires_grad_()

    def take_back(self) -> None:
        self.params.flats[BLOCK].detach().fill_(torch.nan)
        self.params.flats = {}

    def forward(self, layer: Callable[[torch.Tensor], torch.Tensor], entering: torch.Tensor) -> SavedGraph:
        _, graph = keep_graph(layer, entering, self.policy, self.swaps, self.params)
        self.swaps.seal()
        return graph


def expected_grads(layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[Any]:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    torch.autograd.backward(layer(x, w), GRAD)
    return [x.grad, w.grad]


@pytest.mark.parametrize("policy", [KEEP, SWAP], ids=["kept", "swapped"])
def test_a_graph_reads_params_where_they_are_in_the_backward_pass(policy: BlockActivations) -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ w[1:7].t()) @ w[2:] + x

    stage = Stage(policy)
    graph = stage.forward(lambda x: layer(x, stage.weight), X.clone())
    stage.take_back()
    stage.lend()
    found = graph.backward(GRAD)
    x_grad, w_grad = expected_grads(layer)
    assert torch.equal(found, x_grad)
    assert torch.equal(stage.weight.grad, w_grad)
    # Neither the weight nor its views were swapped out.
    assert stage.store.counts.out_nbytes == (4 * (N * N + 2 * N * 6) if policy.swaps else 0)


def test_backward_of_graph_without_its_params_raises() -> None:
    stage = Stage(KEEP)
    graph = stage.forward(lambda x: x @ stage.weight, X.clone())
    stage.take_back()
    with pytest.raises(ParamsNotLentError, match=r"params of block 3, and only those of \[\] are installed"):
        graph.backward(GRAD)


def test_a_storage_leaves_once_and_again_when_it_has_changed() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = x + w
        halves = hidden[:4] * hidden[4:], hidden.t() @ hidden
        return torch.cat([halves[0], halves[1][4:]])

    stage = Stage(SWAP)
    graph = stage.forward(lambda x: layer(x, stage.weight), X.clone())
    assert [event for event, _ in stage.store.events] == ["put"]
    x_grad, w_grad = expected_grads(layer)
    assert torch.equal(graph.backward(GRAD), x_grad)
    assert torch.equal(stage.weight.grad, w_grad)
    assert [event for event, _ in stage.store.events] == ["put", "get"]

    swaps = UnitSwaps(stage.store)
    tensor = torch.ones(N)
    views = [swaps.swap_out(tensor)]
    tensor += 1
    views += [swaps.swap_out(tensor), swaps.swap_out(tensor[2:4])]
    assert stage.store.counts.out_nbytes == 4 * N * N + 2 * 4 * N
    assert [view.tensor().tolist() for view in views] == [[1.0] * N, [2.0] * N, [2.0] * 2]


def test_another_tensor_at_the_address_of_one_that_left_is_another_storage() -> None:
    store = MemoryStore()
    swaps = UnitSwaps(store)
    views = [swaps.swap_out(torch.full((1000,), float(i))) for i in range(20)]
    assert [float(view.tensor()[7]) for view in views] == list(range(20))


class _WatchfulStore(MemoryStore):
    """A store that records how many of the bytes that it returned are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Any, int]] = []
        self.most_alive_nbytes = 0

    def get(self, handle: SwapHandle) -> torch.Tensor:
        tensor = super().get(handle)
        self.given.append((storage_ref(tensor), handle.nbytes))
        self.most_alive_nbytes = max(self.most_alive_nbytes, self.alive_nbytes())
        return tensor

    def alive_nbytes(self) -> int:
        return sum(nbytes for ref, nbytes in self.given if not ref.expired())


def test_returned_activation_is_freed_once_used() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = torch.sin(x) * 1.5
        return x

    store = _WatchfulStore()
    graph = Stage(SWAP, store).forward(layer, X.clone())
    graph.backward(GRAD)
    assert store.counts.in_nbytes == 10 * X.nbytes
    assert store.most_alive_nbytes == X.nbytes
    assert store.alive_nbytes() == 0


def test_kept_graph_does_not_hold_a_swapped_input() -> None:
    for policy, is_gone in ((SWAP, True), (KEEP, False)):
        entering = X.clone()
        ref = storage_ref(entering)
        graph = Stage(policy).forward(torch.sin, entering)
        del entering
        assert ref.expired() == is_gone
        del graph


def test_a_graph_does_not_hold_its_output() -> None:
    stage = Stage(KEEP)
    output, graph = keep_graph(lambda x: torch.sin(x) + 1, X.clone(), KEEP, stage.swaps, stage.params)
    ref = storage_ref(output)
    del output
    assert ref.expired()
    assert graph.backward(GRAD).shape == X.shape


def test_tensor_from_outside_the_block_is_not_swapped() -> None:
    mask = torch.randn(N, N)
    stage = Stage(BlockActivations(recompute=False, swapped=frozenset({"*"})))
    stage.forward(lambda x: x * mask, X.clone())
    assert stage.store.events == []


def test_only_the_named_operators_leave() -> None:
    stage = Stage(BlockActivations(recompute=False, swapped=frozenset({"aten.sin.default#1"})))
    graph = stage.forward(lambda x: torch.exp(torch.sin(torch.sin(torch.sin(x)))), X.clone())
    assert stage.store.counts.out_nbytes == X.nbytes
    x = X.clone().requires_grad_()
    torch.autograd.backward(torch.exp(torch.sin(torch.sin(torch.sin(x)))), GRAD)
    assert torch.equal(graph.backward(GRAD), x.grad)


def test_a_tensor_changed_after_it_was_saved_is_an_error() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sin(x)
        output = torch.sin(hidden)
        hidden.mul_(2)
        return output

    graph = Stage(KEEP).forward(layer, X.clone())
    with pytest.raises(SavedTensorChangedError, match=r"shape \(8, 8\) was changed in place"):
        graph.backward(GRAD)
