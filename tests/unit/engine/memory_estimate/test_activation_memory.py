"""The memory that a choice of activations needs is computed before training begins."""

import pytest
import torch

from tests.support.engine import odd_models
from tests.support.engine.activation_runs import MemoryStore, Run
from tests.support.engine.architectures import ARCHITECTURES, NUM_LAYERS, make_batch, make_model
from tests.support.engine.odd_models import odd_config
from tests.unit.engine.activations.test_parity import POLICIES
from windlass.engine.activations.store import SwapHandle
from windlass.engine.memory_estimate.activation_memory import (
    ActivationNeed,
    ActivationNeedUnknownError,
    activation_need,
)
from windlass.engine.memory_plan.activation_policy import RECOMPUTE_ALL, BlockActivations
from windlass.engine.model.block_runner import BlockRunner
from windlass.engine.model.partition import Partition, build_meta_model
from windlass.storage.ids import BlockIndex, Precision

SHAPES = [(2, 16), (1, 9), (3, 12)]
SLOT_NBYTES = 4096
SWAPPING = {name: policy for name, policy in POLICIES.items() if policy.swaps}


pytestmark = pytest.mark.usefixtures("one_thread")


class SlotStore(MemoryStore):
    """A store that also counts slots."""

    peak_slots = 0

    def put(self, tensor: torch.Tensor) -> SwapHandle:
        handle = super().put(tensor)
        slots = sum(-(-held.nbytes // SLOT_NBYTES) for held in self.held)
        self.peak_slots = max(self.peak_slots, slots)
        return handle


def needed(name: str, choices: list[BlockActivations], precision: Precision) -> ActivationNeed:
    config = ARCHITECTURES[name].config(tied=False, dropout=0.1)
    runner = BlockRunner(Partition(build_meta_model(config, precision)), torch.device("cpu"), seed=0)
    return activation_need(runner, choices, SHAPES, SLOT_NBYTES)


def used(name: str, choices: list[BlockActivations], precision: Precision) -> ActivationNeed:
    dtype = torch.float32 if precision is Precision.FP32 else torch.bfloat16
    model = make_model(ARCHITECTURES[name].config(tied=False, dropout=0.1), dtype)
    store = SlotStore()
    activations = {BlockIndex(i): choice for i, choice in enumerate(choices, start=1)}
    run = Run(model, activations=activations, store=store, precision=precision)
    for _ in range(2):  # in the first step, layers with Python autograd functions are not known yet
        run.step(*make_batch(*SHAPES))
        for buffer in run.grads.values():
            buffer.touched.clear()
    return ActivationNeed(nbytes=store.counts.peak_held_nbytes, num_slots=store.peak_slots)


@pytest.mark.short("Qwen2-all swapped")
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param("Qwen2", "input swapped", marks=pytest.mark.long),
        ("Qwen2", "all swapped"),
        ("GPT-2", "first kept, others swapped"),
        pytest.param("Mixtral", "all swapped", marks=pytest.mark.long),
        ("Bloom", "matrix products swapped"),  # its layers have a Python autograd function
    ],
)
def test_computed_activation_memory_equals_use_of_a_step(name: str, policy: str) -> None:
    choices = [SWAPPING[policy]] * NUM_LAYERS
    assert needed(name, choices, Precision.BF16) == used(name, choices, Precision.BF16)


@pytest.mark.long
@pytest.mark.parametrize("policy", SWAPPING.values(), ids=SWAPPING)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_computed_activation_memory_is_right_for_every_architecture(
    name: str, policy: BlockActivations, precision: Precision
) -> None:
    choices = [policy] * NUM_LAYERS
    assert needed(name, choices, precision) == used(name, choices, precision)


def test_a_kernel_of_the_models_own_is_not_started() -> None:
    partition = Partition(build_meta_model(odd_config(odd_models.KernelModel), Precision.FP32))
    runner = BlockRunner(partition, torch.device("cpu"), seed=0)
    with pytest.raises(ActivationNeedUnknownError, match=r"not known .* RuntimeError: Cannot access data"):
        activation_need(runner, [POLICIES["all swapped"]] * NUM_LAYERS, SHAPES, SLOT_NBYTES)


def test_layers_that_choose_differently_add_up() -> None:
    choices = [POLICIES["matrix products swapped"], RECOMPUTE_ALL, POLICIES["all swapped"]]
    assert needed("Qwen2", choices, Precision.FP32) == used("Qwen2", choices, Precision.FP32)


def test_activations_kept_on_device_need_no_slots() -> None:
    for policy in POLICIES.values():
        if not policy.swaps:
            assert needed("Qwen2", [policy] * NUM_LAYERS, Precision.FP32) == ActivationNeed()
