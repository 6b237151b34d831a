"""Block by block, with recompute and released params, gradients equal those of plain autograd to the last bit."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.support.engine.architectures import ARCHITECTURES, Architecture, make_batch, make_model, plain_step
from windlass.engine.model import block_runner
from windlass.engine.model.block_runner import BlockRunner, random_key
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.model.gradient_check import block_gradients
from windlass.engine.model.model_forward import ModelForward
from windlass.engine.model.partition import Partition, build_meta_model
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import BlockIndex, Precision

SEED, STEP = 7, 3
ONE = ((2, 16),)
SEVERAL = ((2, 16), (1, 9), (3, 12))  # with unequal numbers of targets


pytestmark = pytest.mark.usefixtures("one_thread")


def found_and_expected(
    architecture: Architecture,
    *,
    tied: bool,
    dropout: float = 0.1,
    shapes: tuple[tuple[int, int], ...] = ONE,
    precision: Precision = Precision.FP32,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    config = architecture.config(tied=tied, dropout=dropout)
    model = make_model(config, torch.float32 if precision is Precision.FP32 else torch.bfloat16)
    batch, targets = make_batch(*shapes)
    expected = plain_step(model, architecture.layers, batch, targets, seed=SEED, step=STEP).grads
    partition = Partition(build_meta_model(config, precision))
    assert partition.layers_name == architecture.layers
    found = block_gradients(partition, dict(model.named_parameters()), batch, targets, seed=SEED, step=STEP)
    return found, expected


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of gradients that differ in any bit, including missing and superfluous ones."""
    names = found.keys() | expected.keys()
    return sorted(
        name
        for name in names
        if name not in found or name not in expected or not torch.equal(found[name], expected[name].float())
    )


every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
both = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@pytest.mark.short("tied-*", "untied-Mixtral")
@every_architecture
@both
def test_gradients_are_those_of_plain_autograd(architecture: Architecture, tied: bool) -> None:
    found, expected = found_and_expected(architecture, tied=tied)
    assert differing(found, expected) == []
    assert all(grad.any() for name, grad in expected.items() if "bias" not in name and "expert" not in name)


@every_architecture
def test_gradients_without_dropout_are_those_of_plain_autograd(architecture: Architecture) -> None:
    # Without dropout another attention kernel is used.
    assert differing(*found_and_expected(architecture, tied=False, dropout=0.0)) == []


@pytest.mark.parametrize("name", ["Qwen2", "GPT-2", "Mixtral", "Gemma-2"])
def test_gradients_in_bf16_are_those_of_plain_autograd(name: str) -> None:
    assert differing(*found_and_expected(ARCHITECTURES[name], tied=False, precision=Precision.BF16)) == []


@pytest.mark.short("Qwen2", "Mixtral", "GPT-2", "Gemma-3")
@every_architecture
def test_microbatches_of_unequal_size_accumulate_in_their_order(architecture: Architecture) -> None:
    assert differing(*found_and_expected(architecture, tied=False, shapes=SEVERAL)) == []


@pytest.mark.parametrize("name", ["Qwen2", "GPT-2", "Bloom"])
def test_tied_weights_accumulate_within_rounding(name: str) -> None:
    # Head and embedding first add up their own micro-batches: the same terms in another order.
    found, expected = found_and_expected(ARCHITECTURES[name], tied=True, shapes=SEVERAL)
    different = differing(found, expected)
    assert len(different) <= 1
    for param in different:
        torch.testing.assert_close(found[param], expected[param], rtol=1e-5, atol=1e-7)


def test_an_expert_without_tokens_gets_zeros() -> None:
    architecture = ARCHITECTURES["Mixtral"]
    found, expected = found_and_expected(architecture, tied=False, shapes=((1, 2),))
    experts = [grad.flatten(1) for name, grad in expected.items() if "experts" in name]
    assert experts
    assert any((grad == 0).all(1).any() for grad in experts)  # two tokens cannot reach every expert
    assert differing(found, expected) == []


# --- the check can fail --------------------------------------------------------------------------------------------


def test_read_of_released_buffer_changes_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    install = BlockRunner.install
    first: dict[BlockIndex, Mapping[BlockIndex, torch.Tensor]] = {}

    def install_first(
        self: BlockRunner,
        block: BlockIndex,
        flats: Mapping[BlockIndex, torch.Tensor],
        grads: Mapping[BlockIndex, GradBuffer],
    ) -> None:
        install(self, block, first.setdefault(block, flats) if block == 2 else flats, grads)

    monkeypatch.setattr(BlockRunner, "install", install_first)
    found, expected = found_and_expected(ARCHITECTURES["Qwen2"], tied=False, dropout=0.0)
    wrong = differing(found, expected)
    assert "model.layers.1.mlp.up_proj.weight" in wrong
    assert found["model.layers.1.mlp.up_proj.weight"].isnan().any()
    assert "lm_head.weight" not in wrong  # gradients that come earlier in the backward pass are right


def test_another_random_key_in_recompute_changes_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    num_drawn: dict[int, int] = {}

    def fresh_key(seed: int, step: int, microbatch: int, block: int) -> int:
        num_drawn[block] = num_drawn.get(block, 0) + 1
        return random_key(seed + num_drawn[block] - 1, step, microbatch, block)

    monkeypatch.setattr(block_runner, "random_key", fresh_key)
    found, expected = found_and_expected(ARCHITECTURES["GPT-2"], tied=False)
    wrong = differing(found, expected)
    assert "transformer.h.2.mlp.c_fc.weight" in wrong
    assert "lm_head.weight" not in wrong
    monkeypatch.setattr(block_runner, "random_key", random_key)
    assert differing(*found_and_expected(ARCHITECTURES["GPT-2"], tied=False)) == []


def test_dropped_microbatch_changes_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(self: GradBuffer, name: str, offset: int, grad: torch.Tensor) -> None:
        self.flat[offset : offset + grad.numel()].copy_(grad.reshape(-1))
        self.touched.add(name)

    def overwrite_product(
        self: GradBuffer, name: str, offset: int, left: torch.Tensor, right: torch.Tensor, *, in_fp32: bool
    ) -> None:
        overwrite(self, name, offset, left.t() @ right)

    monkeypatch.setattr(GradBuffer, "add", overwrite)
    monkeypatch.setattr(GradBuffer, "add_product", overwrite_product)
    found, expected = found_and_expected(ARCHITECTURES["Llama"], tied=False, shapes=SEVERAL)
    assert differing(found, expected) == sorted(expected)


# --- the head -------------------------------------------------------------------------------------------------------


class _Lender:
    """Runs single operations of a runner with the params of a whole model."""

    def __init__(self, config: Any, model: Any) -> None:
        self.partition = Partition(build_meta_model(config, Precision.FP32))
        self.runner = BlockRunner(self.partition, torch.device("cpu"), SEED)
        self.params = dict(model.named_parameters())
        self.layout = self.partition.layout
        self.grads = {b.index: GradBuffer(torch.full((b.numel,), torch.nan)) for b in self.layout.blocks}

    def lend(self, block: BlockIndex, *, with_grads: bool) -> None:
        flats = {
            b: torch.cat([self.params[p.name].detach().reshape(-1) for p in self.layout.blocks[b].params])
            for b in self.layout.shared[block]
        }
        self.runner.install(block, flats, {b: self.grads[b] for b in flats} if with_grads else {})

    def forward(self, batch: list[torch.Tensor], *, keep: bool) -> None:
        for block in self.layout.blocks[:-1]:
            self.lend(block.index, with_grads=False)
            self.runner.forward(block.index, STEP, batch, keep=keep)
            self.runner.remove(block.index)


@pytest.mark.parametrize("name", ["Qwen2", "GPT-2", "Gemma-2", "Granite"])
def test_a_head_in_slices_gives_the_loss_and_gradients_of_one_slice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = ARCHITECTURES[name]
    model = make_model(architecture.config(tied=True, dropout=0.1))
    batch, targets = make_batch((4, 40), (3, 30))  # 160 and 90 tokens: three slices of at most 64, and two
    expected = plain_step(model, architecture.layers, batch, targets, seed=SEED, step=STEP)
    monkeypatch.setattr(slice_sizes, "MIN_SLICE_TOKENS", 64)
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 64)
    slices = []
    epilogue = ModelForward.epilogue

    def counting(self: ModelForward, hidden: torch.Tensor) -> torch.Tensor:
        slices.append(hidden.shape[1])
        return epilogue(self, hidden)

    monkeypatch.setattr(ModelForward, "epilogue", counting)
    lender = _Lender(model.config, model)
    lender.forward(batch, keep=True)
    head = lender.partition.head
    lender.lend(head, with_grads=True)
    sums = lender.runner.head(STEP, targets)
    lender.runner.remove(head)
    assert slices == [64, 64, 32, 64, 26]
    assert float(sums.loss_sum) == pytest.approx(expected.loss_sum, rel=1e-6)
    assert (sums.num_targets, int(sums.num_correct)) == (expected.num_targets, expected.num_correct)
    for block in reversed(lender.layout.blocks[:-1]):
        lender.lend(block.index, with_grads=True)
        lender.runner.backward(block.index, STEP, batch)
        lender.runner.remove(block.index)
    for block in lender.layout.blocks:
        for param in block.params:
            found = lender.grads[block.index].flat[param.offset : param.offset + param.numel].view(param.shape)
            torch.testing.assert_close(found, expected.grads[param.name], rtol=1e-4, atol=1e-6)
    assert (lender.runner.inputs, lender.runner.calls, lender.runner.grads) == ([], [], [])


def test_evaluation_gives_the_loss_and_keeps_nothing() -> None:
    architecture = ARCHITECTURES["GPT-2"]
    model = make_model(architecture.config(tied=True, dropout=0.1))
    batch, targets = make_batch(*SEVERAL)
    lender = _Lender(model.config, model)
    model.eval()
    lender.partition.model.eval()
    expected = plain_step(model, architecture.layers, batch, targets, seed=SEED, step=STEP)
    lender.forward(batch, keep=False)
    assert len(lender.runner.inputs) == 1
    lender.lend(lender.partition.head, with_grads=False)
    sums = lender.runner.head(STEP, targets, train=False)
    assert float(sums.loss_sum) == pytest.approx(expected.loss_sum, rel=1e-6)
    assert (sums.num_targets, int(sums.num_correct)) == (expected.num_targets, expected.num_correct)
    assert lender.runner.grads == []


def test_activations_are_the_inputs_of_blocks_and_nothing_else() -> None:
    architecture = ARCHITECTURES["Qwen2"]
    model = make_model(architecture.config(tied=False, dropout=0.1))
    batch, _ = make_batch(*SEVERAL)
    lender = _Lender(model.config, model)
    lender.forward(batch, keep=True)
    kept = lender.runner.inputs
    assert [[tuple(hidden.shape) for hidden in block] for block in kept] == [
        [(*ids.shape, model.config.hidden_size) for ids in batch]
    ] * (lender.partition.num_blocks - 1)
    assert all(hidden.grad_fn is None for block in kept for hidden in block)


def test_a_gradient_buffer_adds_up_and_zeroes_what_nothing_reached() -> None:
    buffer = GradBuffer(torch.full((6,), torch.nan))
    buffer.add("a", 0, torch.tensor([[1.0, 2.0]]))
    buffer.add("a", 0, torch.tensor([[0.5, 0.25]], dtype=torch.bfloat16))
    buffer.finish([("a", 0, 2), ("b", 2, 3)])
    assert buffer.flat[:5].tolist() == [1.5, 2.25, 0.0, 0.0, 0.0]
    assert buffer.flat[5].isnan()  # belongs to no parameter


# --- random keys ----------------------------------------------------------------------------------------------------


def test_random_keys_differ_in_every_part_and_fit_a_seed() -> None:
    keys = {random_key(a, b, c, d) for a in (0, 1, 11) for b in (0, 1, 11) for c in (0, 1, 11) for d in (0, 1, 11)}
    assert len(keys) == 81
    assert all(0 <= key < 2**63 for key in keys)
    # Must never change: a resumed job must draw the same numbers as the interrupted one.
    assert random_key(1, 2, 3, 4) == 1159737786199761749
