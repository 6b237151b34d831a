"""A model in fp16 trains as in a plain loop with fp32 masters and torch's GradScaler, bit for bit."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import windlass
from tests.support.actors.offload_models import Gpt, adamw, assert_same_weights, gpt_loss, offloaded, seeded
from windlass.actors.policy import trainer_state

pytestmark = pytest.mark.usefixtures("one_thread")

GROWTH_INTERVAL = 3
NUM_STEPS = 14


@pytest.fixture(autouse=True)
def fast_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale grows every few steps, so that gradients overflow again and again."""
    monkeypatch.setattr(trainer_state, "_GROWTH_INTERVAL", GROWTH_INTERVAL)


class PlainLoop:
    """The usual loop of an fp16 model: torch's fused AdamW on fp32 masters, and torch's GradScaler."""

    def __init__(self, model: nn.Module, clip_norm: float | None) -> None:
        self._clip_norm = clip_norm
        self._masters = {param: param.detach().float().requires_grad_() for param in model.parameters()}
        self._optimizer = adamw(model)
        for group in self._optimizer.param_groups:
            group["params"] = [self._masters[param] for param in group["params"]]
            group["fused"] = True
        self.param_groups = self._optimizer.param_groups
        self._scaler = torch.amp.GradScaler("cpu", growth_interval=GROWTH_INTERVAL)

    @property
    def loss_scale(self) -> float:
        return float(self._scaler.get_scale())

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self._scaler.scale(loss)  # type: ignore[no-any-return]

    def step(self) -> None:
        for param, master in self._masters.items():
            master.grad = None if param.grad is None else param.grad.float()
        self._scaler.unscale_(self._optimizer)
        if self._clip_norm is not None:
            grads = [
                master.grad.double().square().sum() for master in self._masters.values() if master.grad is not None
            ]
            norm = torch.stack(grads).sum().sqrt()
            if norm.isfinite():
                nn.utils.clip_grads_with_norm_(self._masters.values(), self._clip_norm, norm.float())
        self._scaler.step(self._optimizer)
        self._scaler.update()
        with torch.no_grad():
            for param, master in self._masters.items():
                param.copy_(master)

    def zero_grad(self) -> None:
        for param in self._masters:
            param.grad = None


def train(model: nn.Module, optimizer: Any, first: int, stop: int, *, num_backwards: int = 1) -> list[float]:
    """Returns the loss and the loss scale of each step."""
    found = []
    for step in range(first, stop):
        for i in range(num_backwards):
            loss = gpt_loss(model, step * num_backwards + i) / num_backwards
            optimizer.scale(loss).backward()
            found += [float(loss.detach()), optimizer.loss_scale]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.short("on SSDs", "clipped")
@pytest.mark.parametrize(
    ("options", "num_backwards"),
    [
        ({}, 1),
        ({"backwards_per_step": 2}, 2),
        pytest.param({"host_memory_gib": 1.0}, 1, marks=pytest.mark.long),
        ({"clip_norm": 1e6}, 1),
    ],
    ids=["on SSDs", "two backwards", "in memory", "clipped"],
)
def test_fp16_with_overflows_is_same_as_plain_loop(options: dict[str, Any], num_backwards: int, tmp_path: Path) -> None:
    plain = seeded(Gpt, torch.float16)
    loop = PlainLoop(plain, options.get("clip_norm"))
    expected = train(plain, loop, 0, NUM_STEPS, num_backwards=num_backwards)
    scales = expected[1 :: 2 * num_backwards]
    assert any(later < sooner for sooner, later in itertools.pairwise(scales))  # a step was skipped
    assert any(later > sooner for sooner, later in itertools.pairwise(scales))
    with offloaded(seeded(Gpt, torch.float16), tmp_path, **options) as (model, optimizer):
        assert train(model, optimizer, 0, NUM_STEPS, num_backwards=num_backwards) == expected
        assert_same_weights(model, plain)


@pytest.mark.long
def test_fp16_clips_unscaled_gradients(tmp_path: Path) -> None:
    plain = seeded(Gpt, torch.float16)
    expected = train(plain, PlainLoop(plain, 0.05), 0, NUM_STEPS)
    with offloaded(seeded(Gpt, torch.float16), tmp_path, clip_norm=0.05) as (model, optimizer):
        found, norms = [], []
        for step in range(NUM_STEPS):
            found += train(model, optimizer, step, step + 1)
            norms.append(optimizer.grad_norm or 0.0)
        assert found == pytest.approx(expected, rel=1e-3)
        assert all(0.05 < norm < 100 for norm in norms if math.isfinite(norm))
        assert sum(map(math.isfinite, norms)) > NUM_STEPS / 2


def test_skipped_step_changes_nothing_but_scale(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt, torch.float16), tmp_path) as (model, optimizer):
        train(model, optimizer, 0, 2)
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        before = optimizer.state_dict()
        scale = optimizer.loss_scale
        (optimizer.scale(gpt_loss(model, 2)) * math.inf).backward()
        optimizer.step()
        assert optimizer.loss_scale == scale / 2
        assert optimizer.grad_norm is not None
        assert not math.isfinite(optimizer.grad_norm)
        found = model.state_dict()
        assert [name for name, weight in weights.items() if not torch.equal(found[name], weight)] == []
        after = optimizer.state_dict()
        torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


@pytest.mark.short("True")
@pytest.mark.parametrize("in_folder", [True, False])
def test_resumed_loop_continues_with_same_scale_and_bits(in_folder: bool, tmp_path: Path) -> None:
    plain = seeded(Gpt, torch.float16)
    expected = train(plain, PlainLoop(plain, None), 0, 9)
    with offloaded(seeded(Gpt, torch.float16), tmp_path) as (model, optimizer):
        losses = train(model, optimizer, 0, 5)
        if in_folder:
            optimizer.save(tmp_path / "saved")
        else:
            torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "saved")
    resumed = Gpt().half()
    if not in_folder:
        weights, state = torch.load(tmp_path / "saved")
        resumed.load_state_dict(weights)
    with offloaded(resumed, tmp_path) as (model, optimizer):
        if in_folder:
            optimizer.load(tmp_path / "saved")
        else:
            optimizer.load_state_dict(state)
        assert losses + train(model, optimizer, 5, 9) == expected
        assert_same_weights(model, plain)


def test_loss_that_was_not_scaled_is_refused(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt, torch.float16), tmp_path) as (model, optimizer):
        gpt_loss(model, 0).backward()
        with pytest.raises(windlass.OffloadMisuseError, match=r"optimizer\.scale\(loss\)\.backward\(\)"):
            optimizer.step()


def test_scale_leaves_loss_of_other_precisions_unchanged(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        loss = gpt_loss(model, 0)
        assert optimizer.scale(loss) is loss
        assert optimizer.loss_scale == 1.0


def test_gradscaler_of_torch_is_refused(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path, clip_norm=1.0) as (model, optimizer):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(gpt_loss(model, 0)).backward()
        with pytest.raises(windlass.OffloadMisuseError, match="GradScaler"):
            scaler.step(optimizer)


def test_fp16_with_split_states_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="split states go with bf16 training; in fp16"),
        offloaded(seeded(Gpt, torch.float16), tmp_path, state_precision="split"),
    ):
        pass
