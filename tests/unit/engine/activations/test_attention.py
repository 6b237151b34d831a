"""One name for attention kernels of several devices: activation choices made for one of them hold for the others.

A kernel on the CPU stands in for the GPU's, with all of its outputs: sums with padded tokens, and two random seeds.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.engine.activation_runs import MemoryStore
from windlass.engine.activations.microbatch import Unit
from windlass.engine.activations.operator_costs import list_operators
from windlass.engine.activations.saved_graph import BorrowedParams
from windlass.engine.memory_plan.activation_policy import ATTENTION, BlockActivations
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.profiling.model_profiler import Profiler, config_of_shape
from windlass.storage.ids import Precision

ATEN: Any = torch.ops.aten
BATCH, HEADS, TOKENS, HEAD_SIZE = 2, 3, 20, 8
PADDED = 32


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Registers the GPU's kernel on the CPU, and records its calls."""
    found: list[str] = []

    def forward(
        q: Any, k: Any, v: Any, bias: Any, _: bool, dropout: float, is_causal: bool, *, scale: Any = None
    ) -> Any:
        found.append("forward")
        output, sums = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, is_causal, scale=scale)
        padded = torch.nn.functional.pad(sums.view(BATCH, HEADS, TOKENS), (0, PADDED - TOKENS))
        seeds = [torch.zeros((), dtype=torch.long) for _ in range(2)]
        return output, padded, *seeds

    def backward(
        grad: Any,
        q: Any,
        k: Any,
        v: Any,
        bias: Any,
        output: Any,
        sums: Any,
        seed: Any,
        offset: Any,
        dropout: float,
        mask: Any,
        is_causal: bool = False,
        *,
        scale: Any = None,
    ) -> Any:
        found.append("backward")
        assert (seed.item(), offset.item()) == (0, 0)
        sums = sums[..., :TOKENS].contiguous()
        like_cpu = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        return *like_cpu(grad, q, k, v, output, sums, dropout, is_causal, scale=scale), None

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
        library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
        yield found


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, 2 * x, x + 1, is_causal=True) * x


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    k, v = 2 * x, x + 1
    output: torch.Tensor = ATEN._scaled_dot_product_efficient_attention(x, k, v, None, True, 0.0, True)[0] * x
    return output


def entering() -> torch.Tensor:
    return torch.randn(BATCH, HEADS, TOKENS, HEAD_SIZE, generator=torch.Generator().manual_seed(1))


def names(layer: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    return [operator.name for operator in list_operators(layer, entering()).operators]


def test_operators_have_the_same_names_on_both(calls: list[str]) -> None:
    assert names(on_cpu) == names(on_gpu)
    assert f"{ATTENTION}#0" in names(on_gpu)


POLICIES = {
    "kept": BlockActivations(kept=frozenset({f"{ATTENTION}#0"})),
    "swapped": BlockActivations(swapped=frozenset({f"{ATTENTION}#0"})),
    "graph kept, attention swapped": BlockActivations(recompute=False, swapped=frozenset({ATTENTION})),
    "all swapped": BlockActivations(recompute=False, swapped=frozenset({"*"})),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_choice_holds_what_the_other_kernel_puts_out(policy: BlockActivations, calls: list[str]) -> None:
    grad = torch.ones(BATCH, HEADS, TOKENS, HEAD_SIZE)
    x = entering().requires_grad_()
    on_cpu(x).backward(grad)
    store = MemoryStore()
    unit = Unit(policy, store, BorrowedParams(), copies=False)
    unit.forward(on_gpu, entering())
    found = unit.backward(on_gpu, grad)
    assert torch.equal(found, x.grad)  # type: ignore[arg-type]
    assert calls == ["forward", "backward"]  # the kernel is not computed again


def test_seeds_stay_on_the_device_and_take_no_slots(calls: list[str]) -> None:
    store = MemoryStore()
    unit = Unit(POLICIES["swapped"], store, BorrowedParams(), copies=False)
    unit.forward(on_gpu, entering())
    output_nbytes = entering().nbytes
    assert store.counts.held_nbytes == output_nbytes + BATCH * HEADS * PADDED * 4
    unit.drop()


def test_plans_for_gpus_count_what_is_padded_there() -> None:
    shape = ModelShape(num_layers=1, hidden_size=HEADS * HEAD_SIZE, num_heads=HEADS, vocab_size=64)
    config = config_of_shape(shape, num_tokens=TOKENS)
    nbytes = {}
    for for_gpu in (False, True):
        (layer,) = Profiler(config, Precision.BF16, for_gpu=for_gpu).profile(BATCH, TOKENS).layers
        (nbytes[for_gpu],) = (each.outputs_nbytes for each in layer.operators if each.name == f"{ATTENTION}#0")
    assert nbytes[False] == (BATCH * TOKENS * HEADS * HEAD_SIZE * 2, BATCH * HEADS * TOKENS * 4)
    assert nbytes[True] == (nbytes[False][0], BATCH * HEADS * PADDED * 4)
