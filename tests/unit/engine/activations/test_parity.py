"""With any choice of kept, swapped and recomputed activations, gradients equal plain autograd's to the last bit."""

from typing import Any

import pytest
import torch

from tests.support.engine.activation_runs import SEED, STEP, MemoryStore, Run
from tests.support.engine.architectures import ARCHITECTURES, NUM_LAYERS, make_batch, make_model, plain_step
from windlass.engine.memory_plan.activation_policy import ATTENTION, BlockActivations
from windlass.storage.ids import BlockIndex, Precision

ALL = frozenset({"*"})
MATRIX = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
EITHER_ATTENTION = frozenset({ATTENTION, "aten._softmax.default"})
RANDOM = frozenset({"aten.native_dropout.default", "aten.bernoulli_.float", "aten.bernoulli.p", *EITHER_ATTENTION})
POLICIES = {
    "input swapped": BlockActivations(swap_input=True),
    "all kept": BlockActivations(recompute=False),
    "all swapped": BlockActivations(recompute=False, swap_input=True, swapped=ALL),
    "matrix products swapped, rest kept": BlockActivations(recompute=False, swapped=MATRIX),
    "matrix products kept": BlockActivations(kept=MATRIX),
    "matrix products swapped": BlockActivations(swap_input=True, swapped=MATRIX),
    "first kept, others swapped": BlockActivations(
        kept=frozenset(f"{name}#0" for name in MATRIX), swapped=MATRIX | EITHER_ATTENTION
    ),
    "random ones kept": BlockActivations(kept=RANDOM),
    "every output kept": BlockActivations(kept=ALL),
    "every output swapped": BlockActivations(swap_input=True, swapped=ALL),
}
SHAPES = ((2, 16), (1, 9), (3, 12))


pytestmark = pytest.mark.usefixtures("one_thread")


def everywhere(policy: BlockActivations) -> dict[BlockIndex, BlockActivations]:
    return {BlockIndex(b): policy for b in range(1, NUM_LAYERS + 1)}


def assert_parity(
    name: str,
    activations: dict[BlockIndex, BlockActivations],
    *,
    tied: bool = False,
    dropout: float = 0.1,
    precision: Precision = Precision.FP32,
) -> MemoryStore:
    architecture = ARCHITECTURES[name]
    dtype = torch.float32 if precision is Precision.FP32 else torch.bfloat16
    model: Any = make_model(architecture.config(tied=tied, dropout=dropout), dtype)
    batch, targets = make_batch(*SHAPES)
    recomputed = Run(model, precision=precision).step(batch, targets)
    store = MemoryStore()
    found = Run(model, activations=activations, store=store, precision=precision).step(batch, targets)
    assert [param for param in recomputed if not torch.equal(found[param], recomputed[param])] == []
    if precision is Precision.FP32 and not tied:
        expected = plain_step(model, architecture.layers, batch, targets, seed=SEED, step=STEP).grads
        assert [param for param in expected if not torch.equal(found[param], expected[param])] == []
    assert store.counts.held_nbytes == 0
    return store


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_gradients_are_the_same_under_every_policy(policy: BlockActivations) -> None:
    store = assert_parity("Qwen2", everywhere(policy))
    assert (store.counts.out_nbytes > 0) == policy.swaps


@pytest.mark.short("Gemma-2-matrix products swapped", "Mixtral-first kept, others swapped", "GPT-2-*")
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("GPT-2", "every output kept"),
        ("GPT-2", "random ones kept"),
        ("Mixtral", "first kept, others swapped"),
        ("Mixtral", "all swapped"),
        ("Gemma-2", "matrix products swapped"),
        ("Bloom", "all swapped"),
        ("Bloom", "every output swapped"),
        ("Falcon", "matrix products kept"),
        ("OPT", "every output swapped"),
    ],
)
def test_gradients_are_the_same_for_other_architectures(name: str, policy: str) -> None:
    assert_parity(name, everywhere(POLICIES[policy]))


@pytest.mark.long
@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_the_same_for_every_architecture(name: str, policy: BlockActivations, dropout: float) -> None:
    assert_parity(name, everywhere(policy), dropout=dropout)


@pytest.mark.parametrize("policy", ["all swapped", "matrix products swapped"])
def test_gradients_are_the_same_with_tied_weights(policy: str) -> None:
    assert_parity("GPT-2", everywhere(POLICIES[policy]), tied=True)


@pytest.mark.parametrize("policy", ["all swapped", "first kept, others swapped"])
def test_gradients_are_the_same_in_bf16(policy: str) -> None:
    assert_parity("Qwen2", everywhere(POLICIES[policy]), precision=Precision.BF16)


def test_blocks_choose_for_themselves() -> None:
    policies = {BlockIndex(1): POLICIES["all swapped"], BlockIndex(3): POLICIES["matrix products swapped"]}
    assert_parity("GPT-2", policies)


def test_second_step_repeats_gradients_of_first() -> None:
    architecture = ARCHITECTURES["GPT-2"]
    model = make_model(architecture.config(tied=False, dropout=0.1))
    batch, targets = make_batch(*SHAPES)
    store = MemoryStore()
    run = Run(model, activations=everywhere(POLICIES["matrix products swapped"]), store=store)
    first = {name: grad.clone() for name, grad in run.step(batch, targets).items()}
    first_counts = store.counts
    for buffer in run.grads.values():
        buffer.touched.clear()
    second = run.step(batch, targets)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert store.counts.out_nbytes == 2 * first_counts.out_nbytes
    assert store.counts.peak_held_nbytes == first_counts.peak_held_nbytes
