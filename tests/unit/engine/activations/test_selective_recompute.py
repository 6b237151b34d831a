from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.support.engine.activation_runs import MemoryStore
from windlass.engine.activations.saved_tensors import UnitSwaps
from windlass.engine.activations.selective_recompute import (
    RecomputeMismatchError,
    has_python_function,
    record,
    storage_ref,
)
from windlass.engine.memory_plan.activation_policy import BlockActivations

Function = Callable[[torch.Tensor], torch.Tensor]
MM = "aten.mm.default"
N = 8
ONE_PRODUCT = 2 * N**3  # FLOPs

torch.manual_seed(0)
X, A, B, GRAD = torch.randn(4, N, N)


def parameter(value: torch.Tensor) -> torch.Tensor:
    return value.clone().requires_grad_()


class Outcome:
    """The results of a layer's forward pass and recomputation, compared with plain autograd."""

    def __init__(
        self, make: Callable[[torch.Tensor, torch.Tensor], Function], *, copies: bool = False, **policy: Any
    ) -> None:
        self.store = MemoryStore()
        plain = self._plain(make)
        a, b = parameter(A), parameter(B)
        layer = make(a, b)
        swaps = UnitSwaps(self.store)
        torch.manual_seed(1)
        output, replay, _ = record(layer, X.clone(), BlockActivations(**policy), swaps, copies=copies)
        swaps.seal()
        assert output.grad_fn is None
        assert torch.equal(output, plain[0])
        entering = X.clone().requires_grad_()
        torch.manual_seed(1)
        with FlopCounterMode(display=False) as counter:
            again = replay.run(layer, entering)
        self.num_flops = counter.get_total_flops()
        torch.autograd.backward(again, GRAD)
        found = [entering.grad, a.grad, b.grad]
        self.differing = [
            name
            for name, value, expected in zip("xab", found, plain[1:], strict=True)
            if not (value is expected is None or torch.equal(value, expected))
        ]
        swaps.drop_all()
        assert self.store.counts.held_nbytes == 0

    @staticmethod
    def _plain(make: Callable[[torch.Tensor, torch.Tensor], Function]) -> list[Any]:
        a, b, entering = parameter(A), parameter(B), X.clone().requires_grad_()
        torch.manual_seed(1)
        output = make(a, b)(entering)
        torch.autograd.backward(output, GRAD)
        return [output.detach(), entering.grad, a.grad, b.grad]


def two_products(a: torch.Tensor, b: torch.Tensor) -> Function:
    return lambda x: x + F.gelu(x @ a) @ b


def three_products(a: torch.Tensor, b: torch.Tensor) -> Function:
    return lambda x: torch.tanh(torch.sigmoid(x @ a) @ b) @ a


def test_what_only_the_output_needs_is_not_computed_again() -> None:
    outcome = Outcome(two_products, kept=frozenset({"nothing"}))
    assert outcome.differing == []
    assert outcome.num_flops == ONE_PRODUCT


@pytest.mark.parametrize("choice", ["kept", "swapped"])
def test_a_held_operator_is_not_computed_again(choice: str) -> None:
    outcome = Outcome(two_products, **{choice: frozenset({f"{MM}#0"})})
    assert outcome.differing == []
    assert outcome.num_flops == 0
    assert outcome.store.counts.out_nbytes == (4 * N * N if choice == "swapped" else 0)


def test_what_only_a_held_operator_reads_is_not_computed_again() -> None:
    def sums(a: torch.Tensor, b: torch.Tensor) -> Function:
        return lambda x: torch.exp((x @ a + x) + b)  # backward reads only the last output, and x

    held = Outcome(sums, kept=frozenset({"aten.exp.default"}))
    assert (held.differing, held.num_flops) == ([], 0)
    assert Outcome(sums, kept=frozenset({"nothing"})).num_flops == ONE_PRODUCT


def test_recompute_starts_from_held_outputs() -> None:
    outcome = Outcome(three_products, swapped=frozenset({"aten.tanh.default"}))
    assert outcome.differing == []
    # the first, which sigmoid needs; tanh's output is held, and nothing reads the third
    assert outcome.num_flops == ONE_PRODUCT


def test_swapped_output_that_nothing_reads_is_dropped() -> None:
    outcome = Outcome(two_products, swapped=frozenset({MM}))
    assert outcome.differing == []
    assert outcome.store.events == [("put", 0), ("put", 1), ("drop", 1), ("get", 0)]


@pytest.mark.parametrize(
    "kept",
    [{"aten.native_dropout.default", "aten.bernoulli_.float"}, {f"{MM}#1"}, {"*"}, {"nothing"}],
    ids=lambda kept: " ".join(sorted(kept)),
)
def test_random_operators_draw_what_they_drew_before(kept: set[str]) -> None:
    def layer(a: torch.Tensor, b: torch.Tensor) -> Function:
        def forward(x: torch.Tensor) -> torch.Tensor:
            x = torch.rand_like(x) * (x @ a)
            x = F.dropout(torch.sin(x), 0.5) @ b
            return torch.sin(F.dropout(x, 0.3)) * torch.rand_like(x)

        return forward

    assert Outcome(layer, kept=frozenset(kept)).differing == []


@pytest.mark.parametrize("choice", ["kept", "swapped"])
@pytest.mark.parametrize("operators", [{"*"}, {MM}, {"nothing"}], ids=str)
def test_operators_that_write_in_place_do_not_spoil_what_is_held(choice: str, operators: set[str]) -> None:
    def layer(a: torch.Tensor, b: torch.Tensor) -> Function:
        def forward(x: torch.Tensor) -> torch.Tensor:
            hidden = x @ a
            hidden += x
            hidden[1:].mul_(2.0)
            return torch.sin(hidden.relu_()) @ b

        return forward

    outcome = Outcome(layer, **{choice: frozenset(operators)})
    assert outcome.differing == []


def test_values_that_control_the_program_are_recomputed() -> None:
    def layer(a: torch.Tensor, b: torch.Tensor) -> Function:
        def forward(x: torch.Tensor) -> torch.Tensor:
            chosen = (x @ a).sum(1).topk(3).indices
            if int(chosen[0]) >= 0 and bool((x @ b).detach().max() > 0):
                x = torch.sin(x[chosen.sort().values].sum(0) + x @ b)
            return x

        return forward

    outcome = Outcome(layer, kept=frozenset({"aten.sin.default"}))
    assert outcome.differing == []
    assert outcome.num_flops >= 2 * ONE_PRODUCT


class _Squared(torch.autograd.Function):
    """Reads its input and writes into it without a visible operator, as a custom kernel does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.clone())
        squared = torch.from_numpy(x.detach().numpy() ** 2)
        x.detach().numpy()[:] *= 1.5
        return squared

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def with_function(a: torch.Tensor, b: torch.Tensor) -> Function:
    return lambda x: torch.sin(_Squared.apply(x @ a)) + torch.exp(x @ b)


@pytest.mark.parametrize("choice", ["kept", "swapped"])
def test_outputs_read_by_custom_function_are_held_as_copies(choice: str) -> None:
    outcome = Outcome(with_function, copies=True, **{choice: frozenset({MM})})
    assert (outcome.differing, outcome.num_flops) == ([], 0)
    outcome = Outcome(with_function, copies=False, **{choice: frozenset({MM})})  # not known yet
    assert (outcome.differing, outcome.num_flops) == ([], 2 * ONE_PRODUCT)


def test_layer_with_custom_function_recomputes_all_that_is_not_held() -> None:
    outcome = Outcome(with_function, kept=frozenset({"nothing"}))
    assert (outcome.differing, outcome.num_flops) == ([], 2 * ONE_PRODUCT)


def test_custom_function_is_found_in_a_graph() -> None:
    x = X.clone().requires_grad_()
    assert has_python_function(torch.sin(_Squared.apply(x * 2)) + x)
    assert not has_python_function(torch.sin(x) + x)


def test_kept_output_is_freed_once_used() -> None:
    made = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        hidden = x @ parameter(A)
        made.append(storage_ref(hidden))
        return torch.sin(hidden)

    _, replay, _ = record(layer, X.clone(), BlockActivations(kept=frozenset({MM})), UnitSwaps(None))
    assert not made[0].expired()
    output = replay.run(layer, X.clone().requires_grad_())
    assert made[1] == made[0]
    assert not made[0].expired()  # the graph holds it
    torch.autograd.backward(output, GRAD)
    assert made[0].expired()


def test_recompute_with_other_operators_is_refused() -> None:
    operators: list[Function] = [torch.sin, torch.cos]

    def layer(x: torch.Tensor) -> torch.Tensor:
        for operator in operators:
            x = operator(x)
        return x

    def again(*others: Function) -> None:
        operators[:] = [torch.sin, torch.cos]
        _, replay, _ = record(layer, X.clone(), BlockActivations(kept=frozenset({"*"})), UnitSwaps(None))
        operators[:] = others
        replay.run(layer, X.clone().requires_grad_())

    with pytest.raises(RecomputeMismatchError, match=r"operator 1 of a block is aten.tan.default and was aten.cos"):
        again(torch.sin, torch.tan)
    with pytest.raises(RecomputeMismatchError, match=r"operator 2 of a block is aten.tan.default and was no operator"):
        again(torch.sin, torch.cos, torch.tan)
    with pytest.raises(RecomputeMismatchError, match="called 2 operators the first time and 1 now"):
        again(torch.sin)
