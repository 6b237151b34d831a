"""Blocks with streamed params: gradients equal those with whole params, to the last bit."""

from typing import Any

import pytest
import torch

from tests.support.engine.activation_runs import MemoryStore, Run
from tests.support.engine.architectures import ARCHITECTURES, NUM_LAYERS, make_batch, make_model
from tests.support.engine.odd_models import TwiceModel, odd_config
from windlass.engine.device.device import Device
from windlass.engine.device.dtypes import TORCH_DTYPE
from windlass.engine.memory_plan.activation_policy import ActivationChoice, BlockActivations
from windlass.engine.model.epilogue_calls import EpilogueCalls
from windlass.engine.model.streaming import flats as streamed_flats
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import BlockIndex, Precision

MATRIX = frozenset({"aten.mm.default", "aten.addmm.default"})
POLICIES = {
    **{choice.value: choice.of_layers(1)[0] for choice in ActivationChoice},
    "products kept": BlockActivations(kept=MATRIX),
    "products swapped": BlockActivations(recompute=False, swapped=MATRIX),
    "every output swapped": BlockActivations(swap_input=True, swapped=frozenset({"*"})),
}
# Fused experts, transposed weights, joined projections, norms without params, biases everywhere.
QUICK = ("Mixtral", "GPT-2", "Phi-3", "OLMo", "Bloom")
BATCH, TARGETS = make_batch((2, 16), (1, 9), (3, 12))


pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(name: str) -> Any:
    return ARCHITECTURES[name].config(tied=False, dropout=0.1)


def assert_parity(
    config: Any,
    policy: BlockActivations,
    *,
    poison: bool = True,
    precision: Precision = Precision.FP32,
    streams_ends: bool = False,
) -> None:
    model = make_model(config, TORCH_DTYPE[precision])
    activations = {BlockIndex(b): policy for b in range(1, NUM_LAYERS + 1)}
    expected = Run(model, activations=activations, store=MemoryStore(), precision=precision).step(BATCH, TARGETS)
    device = Device(torch.device("cpu"), poison_released=poison)
    run = Run(
        model,
        activations=activations,
        store=MemoryStore(),
        precision=precision,
        streams_on=device,
        streams_ends=streams_ends,
    )
    assert run.streams is not None
    for _ in range(2):  # from the second step on pieces are prefetched
        found = run.step(BATCH, TARGETS)
        assert [param for param in expected if not torch.equal(found[param], expected[param])] == []
        for buffer in run.grads.values():
            buffer.touched.clear()
    device.token.cancel()


@pytest.mark.short("*-poisoned")
@pytest.mark.parametrize("poison", [True, False], ids=["poisoned", "kept"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_gradients_are_the_same_under_every_policy(policy: BlockActivations, poison: bool) -> None:
    assert_parity(config_of("Qwen2"), policy, poison=poison)


@pytest.mark.short("Mixtral", "GPT-2")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ARCHITECTURES]
)
def test_gradients_with_streamed_params_are_the_same_for_every_architecture(name: str) -> None:
    policy = list(POLICIES)[list(ARCHITECTURES).index(name) % len(POLICIES)]
    assert_parity(config_of(name), POLICIES[policy])


@pytest.fixture
def _sliced_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head goes over a micro-batch of these tests in up to five slices."""
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 8)


@pytest.mark.short("Mixtral", "GPT-2")
@pytest.mark.usefixtures("_sliced_head")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ARCHITECTURES]
)
def test_gradients_with_streamed_embedding_and_head_are_the_same_for_every_architecture(name: str) -> None:
    assert_parity(config_of(name), POLICIES["recompute"], streams_ends=True)


@pytest.mark.usefixtures("_sliced_head")
@pytest.mark.parametrize("poison", [True, False], ids=["poisoned", "kept"])
def test_gradients_with_streamed_embedding_and_head_are_the_same_in_bf16(poison: bool) -> None:
    assert_parity(config_of("Llama"), POLICIES["keep"], poison=poison, precision=Precision.BF16, streams_ends=True)


@pytest.mark.usefixtures("_sliced_head")
@pytest.mark.parametrize("name", ["Llama", "Gemma-2"])
def test_a_streamed_head_repeats_its_calls_for_later_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of its params, in the computing thread, are not among the calls."""
    monkeypatch.setattr(streamed_flats, "copy", lambda target, source: target.copy_(source))
    monkeypatch.setattr(Device, "open_stream", lambda device: device.h2d)
    repeat, repeated = EpilogueCalls.repeat, list[list[int]]()

    def count(self: EpilogueCalls, hidden: torch.Tensor) -> torch.Tensor:
        repeated[-1].append(hidden.shape[1])
        return repeat(self, hidden)

    monkeypatch.setattr(EpilogueCalls, "repeat", count)
    model = make_model(config_of(name), torch.float32)
    device = Device(torch.device("cpu"), poison_released=True)
    options: dict[str, Any]
    for options in ({}, {"streams_on": device, "streams_ends": True}):
        repeated.append([])
        Run(model, **options).step(BATCH, TARGETS)
    device.token.cancel()
    whole, in_pieces = repeated
    assert whole == in_pieces
    assert 8 in whole


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_gradients_with_streamed_params_are_the_same_in_bf16(policy: str) -> None:
    assert_parity(config_of("Llama"), POLICIES[policy], precision=Precision.BF16)


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_gradients_of_modules_that_run_twice_add_up_in_the_same_order(policy: str) -> None:
    assert_parity(odd_config(TwiceModel), POLICIES[policy])


@pytest.mark.parametrize("policy", ["products kept", "products swapped"])
def test_copies_are_not_taken_for_operators_of_the_layer(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that copy, in the computing thread, as on a GPU."""
    monkeypatch.setattr(streamed_flats, "copy", lambda target, source: target.copy_(source))
    monkeypatch.setattr(Device, "open_stream", lambda device: device.h2d)
    assert_parity(config_of("Qwen2"), POLICIES[policy])
