"""Layers whose matrices are cut: the bits of plain PyTorch that computes in the same parts, in every plan."""

from typing import Any

import pytest
import torch

from tests.support.engine.activation_runs import SEED, STEP, MemoryStore, Run
from tests.support.engine.architectures import ARCHITECTURES, NUM_LAYERS, make_batch, make_model, plain_step
from tests.support.engine.odd_models import TwiceModel, odd_config
from tests.support.engine.plain_cuts import cut_plainly
from windlass.engine.device.device import Device
from windlass.engine.device.dtypes import TORCH_DTYPE
from windlass.engine.linear_parts import column_copy
from windlass.engine.linear_parts.cut_linear import CutLinear
from windlass.engine.memory_plan.activation_policy import ActivationChoice, BlockActivations
from windlass.engine.model.streaming import flats as streamed_flats
from windlass.storage.ids import BlockIndex, Precision

pytestmark = pytest.mark.usefixtures("one_thread")

MATRIX = frozenset({"aten.mm.default", "aten.addmm.default"})
POLICIES = {
    **{choice.value: choice.of_layers(1)[0] for choice in ActivationChoice},
    "products kept": BlockActivations(kept=MATRIX),
    "products swapped": BlockActivations(recompute=False, swapped=MATRIX),
    "every output swapped": BlockActivations(swap_input=True, swapped=frozenset({"*"})),
}
# Rows of 32 and 48 elements in parts of at most 500: parts that are not of equal size, and a piece with parts of two.
CUT_NUMEL = 500
ONE, SEVERAL = ((2, 16),), ((2, 16), (1, 9), (3, 12))


def gradients(
    model: Any,
    cut_matrices: int | None,
    shapes: tuple[tuple[int, int], ...],
    policy: BlockActivations,
    *,
    precision: Precision = Precision.FP32,
    streams_on: Device | None = None,
) -> list[dict[str, torch.Tensor]]:
    """The gradients of two steps. From the second one on, pieces are prefetched."""
    activations = {BlockIndex(block): policy for block in range(1, NUM_LAYERS + 1)}
    run = Run(
        model,
        activations=activations,
        store=MemoryStore(),
        precision=precision,
        streams_on=streams_on,
        cut_matrices=cut_matrices,
    )
    found = []
    for _ in range(2):
        step = run.step(*make_batch(*shapes))
        found.append({name: grad.clone() for name, grad in step.items()})
        for buffer in run.grads.values():
            buffer.touched.clear()
    return found


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, grad in expected.items() if not torch.equal(found[name], grad.float())]


def assert_all_plans_alike(
    name: str,
    policy: BlockActivations,
    shapes: tuple[tuple[int, int], ...],
    *,
    precision: Precision = Precision.FP32,
    tied: bool = False,
) -> None:
    """With whole params, and with params in pieces, gradients are those of plain PyTorch with the same parts."""
    architecture = ARCHITECTURES[name]
    config = architecture.config(tied=tied, dropout=0.1)
    model = make_model(config, TORCH_DTYPE[precision])
    assert cut_plainly(model, CUT_NUMEL) >= 3 * NUM_LAYERS
    batch, targets = make_batch(*shapes)
    plain = plain_step(model, architecture.layers, batch, targets, seed=SEED, step=STEP).grads
    whole = gradients(model, CUT_NUMEL, shapes, policy, precision=precision)
    assert [differing(step, plain) for step in whole] == [[], []]
    device = Device(torch.device("cpu"), poison_released=True)
    streamed = gradients(model, CUT_NUMEL, shapes, policy, precision=precision, streams_on=device)
    assert [differing(step, plain) for step in streamed] == [[], []]
    device.token.cancel()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_gradients_under_every_policy_are_those_of_plain_pytorch_in_parts(policy: BlockActivations) -> None:
    assert_all_plans_alike("Qwen2", policy, SEVERAL)


@pytest.mark.short("Qwen3", "GPT-2")
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ("Qwen2", "Falcon")])
def test_gradients_of_every_architecture_are_those_of_plain_pytorch_in_parts(name: str) -> None:
    policy = list(POLICIES)[list(ARCHITECTURES).index(name) % len(POLICIES)]
    assert_all_plans_alike(name, POLICIES[policy], ONE)


def test_linear_layers_of_a_models_own_stay_whole() -> None:
    """Falcon's are a subclass that computes in another way."""
    model = make_model(ARCHITECTURES["Falcon"].config(tied=True, dropout=0.1))
    embedding, *layers, _ = Run(model).layout.blocks
    assert max(param.numel for layer in layers for param in layer.params) > embedding.numel
    whole, cut = (gradients(model, cut, ONE, POLICIES["keep"])[0] for cut in (None, embedding.numel))
    assert differing(cut, whole) == []
    assert not any(param.is_divisible for block in layers for param in block.params)


@pytest.mark.parametrize("policy", ["recompute", "keep", "products swapped"])
@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_gradients_in_bf16_are_those_of_plain_pytorch_in_parts(name: str, policy: str) -> None:
    assert_all_plans_alike(name, POLICIES[policy], ONE, precision=Precision.BF16)


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_gradients_of_tied_models_are_those_of_plain_pytorch_in_parts(policy: str) -> None:
    assert_all_plans_alike("Qwen2", POLICIES[policy], ONE, tied=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_modules_that_run_twice_add_up_in_the_same_order(policy: str) -> None:
    model = make_model(odd_config(TwiceModel))
    whole = gradients(model, None, ONE, POLICIES[policy])[0]
    cut = gradients(model, CUT_NUMEL, ONE, POLICIES[policy])
    device = Device(torch.device("cpu"), poison_released=True)
    streamed = gradients(model, CUT_NUMEL, ONE, POLICIES[policy], streams_on=device)
    device.token.cancel()
    assert differing(cut[0], cut[1]) == differing(cut[0], streamed[0]) == differing(cut[0], streamed[1]) == []
    for name, grad in whole.items():
        torch.testing.assert_close(cut[0][name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["products kept", "products swapped"])
def test_copies_are_not_taken_for_operators_of_the_layer(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that copy, in the computing thread, as on a GPU."""
    for module in (streamed_flats, column_copy):
        monkeypatch.setattr(module, "copy", lambda target, source: target.copy_(source))
    monkeypatch.setattr(Device, "open_stream", lambda device: device.h2d)
    assert_all_plans_alike("Qwen2", POLICIES[policy], SEVERAL)


def listed(name: str, cut_matrices: int | None) -> Any:
    model = make_model(ARCHITECTURES[name].config(tied=False, dropout=0.0))
    return Run(model, cut_matrices=cut_matrices).runner.operators(BlockIndex(1), 2, 16)


@pytest.mark.parametrize(("name", "num_products"), [("Qwen2", 7), ("GPT-2", 4)])
def test_a_cut_product_is_listed_as_the_operator_that_it_replaces(name: str, num_products: int) -> None:
    """So choices of activations mean the same, with and without a cut."""
    whole, cut = listed(name, None), listed(name, CUT_NUMEL)
    assert sum(operator.name.partition("#")[0] in MATRIX for operator in cut.operators) == num_products
    assert cut == whole


def test_a_held_product_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the first step either, as that of other Python autograd functions is."""
    model = make_model(ARCHITECTURES["Llama"].config(tied=False, dropout=0.0))
    run = Run(model, activations={BlockIndex(2): POLICIES["products kept"]}, cut_matrices=CUT_NUMEL)
    batch, targets = make_batch(*ONE)
    blocks = range(1, NUM_LAYERS + 1)
    for block in (BlockIndex(0), *map(BlockIndex, blocks)):
        run.forward(block, batch)
    run.head(targets)
    products: list[int] = []
    compute = CutLinear._outputs
    monkeypatch.setattr(CutLinear, "_outputs", lambda *args: products.append(block) or compute(*args))
    for block in reversed(blocks):
        run.backward(BlockIndex(block), batch)
    assert products == [3] * 7 + [1] * 7
