import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.engine.activation_runs import MemoryStore, Run
from tests.support.engine.architectures import ARCHITECTURES, make_batch, make_model
from windlass.engine.activations.operator_costs import OperatorCost, list_operators
from windlass.engine.activations.selective_recompute import Names
from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.storage.ids import BlockIndex, Precision

BATCH, _ = make_batch((2, 16))


def test_names_bytes_and_flops_of_a_small_layer() -> None:
    weight = torch.randn(8, 6, device="meta")

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ weight).t().exp_() + 1

    assert list_operators(layer, torch.empty(4, 8, device="meta")).operators == [
        OperatorCost(name="aten.mm.default#0", outputs_nbytes=(96,), num_flops=2 * 4 * 8 * 6, is_saved=True, reads=()),
        OperatorCost(name="aten.sin.default#0", outputs_nbytes=(96,), num_flops=0, is_saved=False, reads=(0,)),
        OperatorCost(name="aten.exp_.default#0", outputs_nbytes=(96,), num_flops=0, is_saved=True, reads=(1,)),
        OperatorCost(name="aten.add.Tensor#0", outputs_nbytes=(96,), num_flops=0, is_saved=False, reads=(2,)),
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("num_key_value_heads", [4, 2, 1])
def test_attention_with_fewer_heads_of_keys_has_the_flops_of_all_heads(device: str, num_key_value_heads: int) -> None:
    keys = torch.randn(2, num_key_value_heads, 16, 8, device=device)

    def attend(queries: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, keys, is_causal=True, enable_gqa=True)

    listed = list_operators(attend, torch.randn(2, 4, 16, 8, device=device))
    # Two products of 16 x 8 x 16 for each of two examples and four heads.
    assert sum(cost.num_flops for cost in listed.operators) == 2 * (2 * 4) * (2 * 16 * 8 * 16)


@pytest.mark.parametrize("name", ["Qwen2", "GPT-2", "Mixtral", "Falcon"])
def test_the_list_is_what_a_real_layer_calls(name: str) -> None:
    model = make_model(ARCHITECTURES[name].config(tied=True, dropout=0.1), torch.bfloat16)
    run = Run(model, precision=Precision.BF16)
    listed = run.runner.operators(BlockIndex(2), *BATCH[0].shape)
    run.forward(BlockIndex(0), BATCH)
    run.lend(BlockIndex(2), with_grads=True)
    entering = run.runner.inputs[0][0].detach().requires_grad_()
    with FlopCounterMode(display=False) as counter, Names() as names:
        run.runner._model_forward.layer(BlockIndex(2), entering, run.runner.calls[0])
    called = sorted(f"{operator}#{i}" for operator, num in names.num_calls.items() for i in range(num))
    assert sorted(cost.name for cost in listed.operators) == called
    assert counter.get_total_flops() <= sum(cost.num_flops for cost in listed.operators) > 0
    assert run.runner.inputs[0][0].shape == (2, 16, 32)  # the runner is unchanged


def test_what_is_saved_is_what_a_swapped_graph_moves() -> None:
    model = make_model(ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.1))
    store = MemoryStore()
    policy = BlockActivations(recompute=False, swapped=frozenset({"*"}))
    run = Run(model, activations={BlockIndex(1): policy}, store=store)
    listed = run.runner.operators(BlockIndex(1), *BATCH[0].shape)
    run.forward(BlockIndex(0), BATCH)
    run.forward(BlockIndex(1), BATCH)
    assert sum(sum(cost.outputs_nbytes) for cost in listed.operators if cost.is_saved) == store.counts.out_nbytes > 0
