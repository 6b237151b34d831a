"""Calls after the last layer are recorded once and repeated, with the same bits, unless they depend on values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.engine.activation_runs import Run
from tests.support.engine.architectures import ARCHITECTURES, make_batch, make_model
from windlass.engine.device.dtypes import TORCH_DTYPE
from windlass.engine.memory_estimate.live_storages import LiveStorageTracker
from windlass.engine.model import model_forward
from windlass.engine.model.epilogue_calls import EpilogueCalls
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import Precision

CPU = torch.device("cpu")
Code = Callable[[torch.Tensor], torch.Tensor]


class Negative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class Odd(nn.Module):
    """A module with a Python autograd function and a value that it reads."""

    def forward(self, hidden: torch.Tensor, *, scale: float) -> torch.Tensor:
        shifted: torch.Tensor = Negative.apply(hidden)  # type: ignore[no-untyped-call]
        return shifted * float(hidden.detach().max()) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.odd, self.head = nn.LayerNorm(8), Odd(), nn.Linear(8, 12, bias=False)
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("scale", torch.tensor(0.5))


def hidden_state(seed: int) -> torch.Tensor:
    return torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_(True)


def recorded(model: Model, code: Code) -> EpilogueCalls:
    hidden = hidden_state(1)
    calls = EpilogueCalls(model, [model.norm, model.odd, model.head], hidden)
    with calls:
        logits = code(hidden)
    calls.end(logits)
    return calls


def outcome(model: Model, run: Code) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    hidden = hidden_state(2)
    logits = run(hidden)
    logits.square().sum().backward()
    assert hidden.grad is not None
    return [logits.detach(), hidden.grad, *(torch.zeros(1) if p.grad is None else p.grad for p in model.parameters())]


def with_functions(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    hidden = model.norm(hidden)
    hidden = hidden.view(hidden.shape[0] * hidden.size(1), -1)
    hidden = hidden * torch.full((8,), 0.5, dtype=hidden.dtype, device=hidden.device) + model.weight
    hidden = nn.functional.dropout(hidden, 0.5, training=True)
    logits: torch.Tensor = model.head(hidden.view(1, -1, 8))[:, slice(0, None), :]
    logits = logits / 3.0
    logits *= model.scale
    return torch.tanh(logits)


@pytest.mark.parametrize(
    "code",
    [
        with_functions,
        lambda model, hidden: model.head(model.odd(hidden, scale=0.5)),
        lambda model, hidden: nn.functional.linear(hidden, model.head.weight).split(6, dim=-1)[1],
    ],
    ids=["functions", "odd module", "weight"],
)
def test_repeated_calls_give_the_same_bits(code: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
    model = Model()
    calls = recorded(model, lambda hidden: code(model, hidden))
    assert calls.is_repeatable
    expected = outcome(model, lambda hidden: code(model, hidden))
    for _ in range(2):
        assert all(map(torch.equal, outcome(model, calls.repeat), expected))


STRAY = torch.ones(8)


@pytest.mark.parametrize(
    "code",
    [
        lambda hidden: hidden * float(hidden.detach().max()),
        lambda hidden: hidden * hidden.max().item(),
        lambda hidden: hidden * 2 if hidden.max() > 0 else hidden,
        lambda hidden: hidden * hidden.max().tolist(),
        lambda hidden: hidden * STRAY,
        lambda hidden: Negative.apply(hidden),
        lambda hidden: STRAY,
    ],
    ids=["float", "item", "bool", "list", "unknown tensor", "autograd function", "unknown result"],
)
def test_code_that_may_depend_on_values_is_not_repeated(code: Code) -> None:
    assert not recorded(Model(), code).is_repeatable


def test_a_repeated_call_keeps_no_tensor_alive() -> None:
    model = Model()
    calls = recorded(model, lambda hidden: with_functions(model, hidden))
    living = LiveStorageTracker(CPU)
    with living, torch.no_grad():
        calls.repeat(hidden_state(2))
    assert living.nbytes == 0


def head_of(name: str, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[torch.Tensor]]:
    """Runs the head over slices of 64, 64, 32, 64 and 26 tokens; returns its own forwards and its results."""
    num_own = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_own
        num_own += 1
        return run_on_meta(*args, **kwargs)

    run_on_meta = model_forward.run_on_meta
    model = make_model(ARCHITECTURES[name].config(tied=False, dropout=0.1), TORCH_DTYPE[precision])
    run = Run(model, precision=precision)
    batch, targets = make_batch((4, 40), (3, 30))
    for block in run.layout.blocks[:-1]:
        run.forward(block.index, batch)
    with monkeypatch.context() as patch:
        patch.setattr(slice_sizes, "MIN_SLICE_TOKENS", 64)
        patch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 64)
        patch.setattr(model_forward, "run_on_meta", counted)
        run.head(targets)
    buffers = [run.grads[block] for block in run.layout.shared[run.partition.head]]
    assert run.runner._model_forward._epilogues == {}
    return num_own, [*run.runner.grads, *(buffer.flat.nan_to_num() for buffer in buffers)]


@pytest.mark.short("Qwen2", "Gemma-2", "Mixtral", "GPT-2")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_head_runs_the_models_own_forward_once_for_each_length_of_slice(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_own, found = head_of(name, Precision.BF16, monkeypatch)
    assert num_own == 3
    monkeypatch.setattr(EpilogueCalls, "end", lambda self, logits: self._refuse())
    num_own, expected = head_of(name, Precision.BF16, monkeypatch)
    assert num_own == 5
    assert all(map(torch.equal, found, expected))
