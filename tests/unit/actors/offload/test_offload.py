"""Offloaded training gives the losses and weights of plain PyTorch, bit for bit where the update kernel is the same."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.actors.offload_models import (
    Dit,
    Gpt,
    PlainAdam,
    adamw,
    assert_same_weights,
    dit_loss,
    gpt_loss,
    offloaded,
    seeded,
)
from tests.support.training import make_model

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 4
Loss = Callable[[nn.Module, int], torch.Tensor]


def qwen2(directory: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    path = make_model(directory / "model", tied=True)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.config.use_cache = False  # type: ignore[union-attr]
    return model.train()


def gpt2(_: Path) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=3, n_head=2, use_cache=False)
    return GPT2LMHeadModel(config).train()  # type: ignore[no-any-return]  # with dropout


def train(
    model: nn.Module, optimizer: Any, loss_of: Loss, *, num_backwards: int = 1, num_steps: int = NUM_STEPS
) -> list[float]:
    """The user's training loop, for a plain or an offloaded model."""
    losses = []
    torch.manual_seed(7)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        for i in range(num_backwards):
            loss = loss_of(model, step * num_backwards + i) / num_backwards
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plainly(model: nn.Module, clip_norm: float | None = None) -> PlainAdam:
    return PlainAdam(adamw(model), clip_norm)


@pytest.mark.short("*-bf16", "gpt-fp32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt", "gpt dropout", "dit", "qwen2", "gpt2"])
def test_same_as_plain_pytorch(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    makers: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
        "gpt": (Gpt, gpt_loss),
        "gpt dropout": (lambda: Gpt(dropout=0.2), gpt_loss),
        "dit": (Dit, dit_loss),
        "qwen2": (lambda: qwen2(tmp_path), gpt_loss),
        "gpt2": (lambda: gpt2(tmp_path), gpt_loss),
    }
    make, loss_of = makers[name]
    plain = seeded(make, dtype)
    expected = train(plain, plainly(plain), loss_of)
    with offloaded(seeded(make, dtype), tmp_path) as (model, optimizer):
        assert train(model, optimizer, loss_of) == expected
        assert_same_weights(model, plain)


@pytest.mark.short("set-AdamW", "default-Adam")
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize(
    "options", [{}, {"betas": (0.7, 0.8), "eps": 0.1, "weight_decay": 0.3}], ids=["default", "set"]
)
def test_offload_is_same_as_torchs_own_fused_adam(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    plain = seeded(Gpt)
    fused = make(plain.parameters(), lr=1e-3, fused=True, **options)
    expected = train(plain, fused, gpt_loss)
    make_optimizer = lambda model: make(model.parameters(), lr=1e-3, **options)  # noqa: E731
    with offloaded(seeded(Gpt), tmp_path, make_optimizer=make_optimizer) as (model, optimizer):
        assert train(model, optimizer, gpt_loss) == expected
        assert_same_weights(model, plain)


@pytest.mark.short("on SSDs-dit", "some in memory-gpt")
@pytest.mark.parametrize("loss_of", [gpt_loss, dit_loss], ids=["gpt", "dit"])
@pytest.mark.parametrize(
    ("host_memory_gib", "num_host_layers"),
    [(None, [0]), (0.0022, [1, 2]), (1.0, [4])],
    ids=["on SSDs", "some in memory", "all in memory"],
)
def test_clipping(loss_of: Loss, host_memory_gib: float | None, num_host_layers: list[int], tmp_path: Path) -> None:
    make = Gpt if loss_of is gpt_loss else Dit
    plain = seeded(make)
    plain_optimizer = plainly(plain, clip_norm=0.05)
    expected = train(plain, plain_optimizer, loss_of)
    options = {"clip_norm": 0.05, "host_memory_gib": host_memory_gib}
    with offloaded(seeded(make), tmp_path, **options) as (model, optimizer):
        assert optimizer.statistics.num_host_layers in num_host_layers
        losses = train(model, optimizer, loss_of)
        assert plain_optimizer.grad_norm is not None
        assert plain_optimizer.grad_norm > 0.05  # it does clip
        assert optimizer.grad_norm == pytest.approx(plain_optimizer.grad_norm, rel=1e-5)
        assert losses == pytest.approx(expected, rel=1e-5)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-4, atol=1e-6)


def test_squared_norm_of_gradients_that_came_in_any_order_has_the_same_bits(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path, clip_norm=0.05) as (model, optimizer):
        gpt_loss(model, 0).backward()
        updates = optimizer._engine._updates
        expected, squares = updates.squared_norm(), dict(updates._squares)
        found, plain_sums = set(), set()
        for seed in range(30):
            order = random.Random(seed).sample(sorted(squares), len(squares))
            updates._squares = {key: squares[key] for key in order}
            found.add(updates.squared_norm())
            plain_sums.add(sum(updates._squares.values()))
        assert len(plain_sums) > 1  # the order changes the sum
        assert found == {expected}


@pytest.mark.short("bf16-declared", "fp32-more declared than done")
@pytest.mark.parametrize("declared", [3, 1000], ids=["declared", "more declared than done"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_several_backwards_before_a_step(declared: int, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = seeded(Dit, dtype)
    expected = train(plain, plainly(plain), dit_loss, num_backwards=3)
    with offloaded(seeded(Dit, dtype), tmp_path, backwards_per_step=declared) as (model, optimizer):
        assert train(model, optimizer, dit_loss, num_backwards=3) == expected
        assert_same_weights(model, plain)


@pytest.mark.parametrize("state_precision", ["split", "bf16"])
def test_smaller_states(state_precision: str, tmp_path: Path) -> None:
    plain = seeded(Gpt, torch.bfloat16)
    expected = train(plain, plainly(plain), gpt_loss)
    options = {"state_precision": state_precision}
    with offloaded(seeded(Gpt, torch.bfloat16), tmp_path, **options) as (model, optimizer):
        losses = train(model, optimizer, gpt_loss)
        if state_precision == "split":  # the same bits in less space
            assert losses == expected
            assert_same_weights(model, plain)
        else:
            assert losses == pytest.approx(expected, rel=2e-2)


def test_autocast(tmp_path: Path) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return gpt_loss(model, step)

    plain = seeded(Gpt)
    expected = train(plain, plainly(plain), loss_of)
    assert expected[0] != float(gpt_loss(seeded(Gpt), 0).detach())  # autocast changes the loss
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        assert train(model, optimizer, loss_of) == expected
        assert_same_weights(model, plain)


def test_evaluation_in_between(tmp_path: Path) -> None:
    """Evaluation and inference leave no trace and see the newest weights. They may run the layers in another order."""

    def evaluate(model: nn.Module) -> list[float]:
        model.eval()
        with torch.no_grad():
            losses = [float(gpt_loss(model, 99))]
        with torch.inference_mode():
            losses += [float(gpt_loss(model, step)) for step in (98, 97)]
        model.train()
        return losses

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        seen.append(evaluate(model))
        return gpt_loss(model, step)

    seen: list[list[float]] = []
    make = lambda: Gpt(dropout=0.1)  # noqa: E731
    plain = seeded(make)
    expected = train(plain, plainly(plain), loss_of)
    seen_plainly = seen[:]
    seen.clear()
    with offloaded(seeded(make), tmp_path) as (model, optimizer):
        assert train(model, optimizer, loss_of) == expected
        assert seen == seen_plainly
        assert_same_weights(model, plain)


def test_parts_without_gradients_stay_as_they_are(tmp_path: Path) -> None:
    """Frozen params, layers that a step skips, and params that are not in the optimizer."""

    class Skipping(Gpt):
        num_calls = 0

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            layers, kept = self.layers, [layer for i, layer in enumerate(self.layers) if i != self.num_calls % 4]
            self.__dict__["_modules"] = {**self._modules, "layers": kept}
            try:
                return super().forward(ids)
            finally:
                self.__dict__["_modules"]["layers"] = layers

    def make() -> nn.Module:
        model = Skipping()
        model.layers[0].requires_grad_(False)
        model.embedding.requires_grad_(False)
        model.layers[2].qkv.bias.requires_grad_(False)
        return model

    def adamw_of_some(model: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW([p for n, p in model.named_parameters() if "layers.3.mlp" not in n], lr=1e-3)

    plain = seeded(make)
    expected = train(plain, PlainAdam(adamw_of_some(plain), None), gpt_loss, num_steps=6)
    with offloaded(seeded(make), tmp_path, make_optimizer=adamw_of_some) as (model, optimizer):
        assert train(model, optimizer, gpt_loss, num_steps=6) == expected
        assert_same_weights(model, plain)


def test_layers_called_twice_and_forwards_without_backward(tmp_path: Path) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        forgotten = gpt_loss(model, step + 50)
        del forgotten
        kept.append(gpt_loss(model, step + 60))  # its graph stays alive
        return gpt_loss(model, step) + 0.5 * gpt_loss(model, step + 1)

    kept: list[torch.Tensor] = []
    plain = seeded(Gpt)
    expected = train(plain, plainly(plain), loss_of)
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        losses = train(model, optimizer, loss_of)
        assert losses == pytest.approx(expected, rel=1e-6)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-4, atol=1e-6)


def test_gradients_dropped_before_the_step(tmp_path: Path) -> None:
    plain = seeded(Gpt)
    expected = train(plain, plainly(plain), gpt_loss)
    with offloaded(seeded(Gpt), tmp_path, backwards_per_step=2) as (model, optimizer):
        gpt_loss(model, 1234).backward()
        optimizer.zero_grad()
        assert train(model, optimizer, gpt_loss) == expected
        assert_same_weights(model, plain)


@pytest.mark.long  # compiles a kernel
def test_the_compiled_kernel(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C++ compiler: {compiler}")
    plain = seeded(Gpt, torch.bfloat16)
    expected = train(plain, plainly(plain), gpt_loss)
    options = {"kernel": "compiled", "kernel_dir": tmp_path / "kernels"}
    with offloaded(seeded(Gpt, torch.bfloat16), tmp_path, **options) as (model, optimizer):
        assert train(model, optimizer, gpt_loss) == pytest.approx(expected, rel=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_on_a_gpu(clip_norm: float | None, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        ids = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(step)).cuda()
        return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def train_on_gpu(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> list[float]:
        losses = []
        torch.cuda.manual_seed(7)
        for step in range(NUM_STEPS):
            loss = loss_of(model, step)
            loss.backward()
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    make = lambda: Gpt(dropout=0.1)  # noqa: E731
    plain = seeded(make).cuda()
    expected = train_on_gpu(plain, adamw(plain), clip_norm)
    with offloaded(seeded(make), tmp_path, device="cuda", clip_norm=clip_norm) as (model, optimizer):
        assert train_on_gpu(model, optimizer, None) == pytest.approx(expected, rel=1e-4)
