"""A loop that is saved and resumed gives the bits of one that was not, and the state is that of torch's AdamW."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import windlass
from tests.support.actors.offload_models import Gpt, PlainAdam, adamw, assert_same_weights, gpt_loss, offloaded, seeded

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = [
    pytest.param(torch.float32, {}, id="fp32"),
    pytest.param(torch.bfloat16, {}, id="bf16"),
    pytest.param(torch.bfloat16, {"state_precision": "split"}, id="split"),
]


def train(model: nn.Module, optimizer: Any, first: int, stop: int) -> None:
    """Trains steps `first` to `stop` - 1, with learning rates that only the optimizer's groups hold."""
    for step in range(first, stop):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        gpt_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def after_six_plain_steps(dtype: torch.dtype, clip_norm: float | None = None) -> nn.Module:
    plain = seeded(Gpt, dtype)
    train(plain, PlainAdam(adamw(plain), clip_norm, scales_in_fp32=True), 0, 6)
    return plain


@pytest.mark.short("split-clipped", "bf16-free")
@pytest.mark.parametrize("clip_norm", [None, 0.05], ids=["free", "clipped"])
@pytest.mark.parametrize(("dtype", "options"), FORMATS)
def test_load_of_saved_folder_in_new_objects_continues_as_plain_loop(
    dtype: torch.dtype, options: dict[str, Any], clip_norm: float | None, tmp_path: Path
) -> None:
    options = {**options, "clip_norm": clip_norm}
    with offloaded(seeded(Gpt, dtype), tmp_path, **options) as (model, optimizer):
        train(model, optimizer, 0, 3)
        optimizer.save(tmp_path / "saved" / "step-3")
        train(model, optimizer, 3, 4)  # the folder is not changed by it
    # The new loop has other weights and other states until it loads.
    with offloaded(Gpt().to(dtype), tmp_path, **options, host_memory_gib=0.01) as (model, optimizer):
        train(model, optimizer, 7, 9)
        optimizer.load(tmp_path / "saved" / "step-3")
        train(model, optimizer, 3, 6)
        assert_same_weights(model, after_six_plain_steps(dtype, clip_norm))


@pytest.mark.short("split-free")
@pytest.mark.parametrize("clip_norm", [None, pytest.param(0.05, marks=pytest.mark.long)], ids=["free", "clipped"])
@pytest.mark.parametrize(("dtype", "options"), FORMATS)
def test_load_state_dict_in_new_objects_continues_as_plain_loop(
    dtype: torch.dtype, options: dict[str, Any], clip_norm: float | None, tmp_path: Path
) -> None:
    options = {**options, "clip_norm": clip_norm}
    with offloaded(seeded(Gpt, dtype), tmp_path, **options) as (model, optimizer):
        train(model, optimizer, 0, 3)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, tmp_path / "saved.pt")
        train(model, optimizer, 3, 4)
    saved = torch.load(tmp_path / "saved.pt")
    resumed = Gpt().to(dtype)
    resumed.load_state_dict(saved["model"])
    with offloaded(resumed, tmp_path, **options) as (model, optimizer):
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, 3, 6)
        assert_same_weights(model, after_six_plain_steps(dtype, clip_norm))


@pytest.mark.long
def test_states_in_bf16_continue_with_same_bits(tmp_path: Path) -> None:
    options = {"state_precision": "bf16"}
    with offloaded(seeded(Gpt, torch.bfloat16), tmp_path, **options) as (model, optimizer):
        train(model, optimizer, 0, 3)
        optimizer.save(tmp_path / "saved")
        train(model, optimizer, 3, 6)
        expected = model.state_dict()
    with offloaded(Gpt().to(torch.bfloat16), tmp_path, **options) as (model, optimizer):
        optimizer.load(tmp_path / "saved")
        train(model, optimizer, 3, 6)
        found = model.state_dict()
    assert [name for name, weight in expected.items() if not torch.equal(found[name], weight)] == []


@pytest.mark.long
def test_states_of_fp32_continue_in_split_format(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt, torch.bfloat16), tmp_path) as (model, optimizer):
        train(model, optimizer, 0, 3)
        optimizer.save(tmp_path / "saved")
    with offloaded(Gpt().to(torch.bfloat16), tmp_path, state_precision="split") as (model, optimizer):
        optimizer.load(tmp_path / "saved")
        train(model, optimizer, 3, 6)
        assert_same_weights(model, after_six_plain_steps(torch.bfloat16))


def _save_and_die(directory: Path) -> None:
    torch.set_num_threads(1)
    with offloaded(seeded(Gpt), directory) as (model, optimizer):
        train(model, optimizer, 0, 3)
        optimizer.save(directory / "saved")
        train(model, optimizer, 3, 4)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_loop_of_killed_process_continues_from_saved_folder(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_save_and_die, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        optimizer.load(tmp_path / "saved")
        train(model, optimizer, 3, 6)
        assert_same_weights(model, after_six_plain_steps(torch.float32))


def fused(model: nn.Module) -> torch.optim.AdamW:
    optimizer = adamw(model)
    for group in optimizer.param_groups:
        group["fused"] = True
    return optimizer


def test_state_dict_of_torchs_adamw_continues_offloaded_and_back(tmp_path: Path) -> None:
    plain = seeded(Gpt)
    plain_optimizer = fused(plain)
    train(plain, plain_optimizer, 0, 3)
    copy = Gpt()
    copy.load_state_dict(plain.state_dict())
    with offloaded(copy, tmp_path) as (model, optimizer):
        optimizer.load_state_dict(plain_optimizer.state_dict())
        train(model, optimizer, 3, 5)
        weights, state = model.state_dict(), optimizer.state_dict()
    back = Gpt()
    back.load_state_dict(weights)
    back_optimizer = fused(back)
    back_optimizer.load_state_dict(state)
    train(back, back_optimizer, 5, 7)
    train(plain, plain_optimizer, 3, 7)
    assert_same_weights(back, plain)


def test_state_dict_has_layout_and_values_of_torchs_adamw(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = Gpt()
        model.layers[0].qkv.requires_grad_(False)
        return model

    plain = seeded(make)
    plain_optimizer = fused(plain)
    train(plain, plain_optimizer, 0, 2)
    expected = plain_optimizer.state_dict()
    with offloaded(seeded(make), tmp_path, make_optimizer=fused) as (model, optimizer):
        assert optimizer.state_dict()["state"] == {}
        train(model, optimizer, 0, 2)
        found = optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert set(found["state"]) == set(expected["state"])
    for index, state in expected["state"].items():
        assert set(found["state"][index]) == set(state)
        torch.testing.assert_close(found["state"][index], state, rtol=0, atol=0)


def test_load_state_dict_without_states_begins_anew(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        fresh = optimizer.state_dict()
        train(model, optimizer, 0, 2)
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        optimizer.load_state_dict(fresh)
        assert optimizer.state_dict()["state"] == {}
        train(model, optimizer, 2, 4)
        found = model.state_dict()
    plain = Gpt()
    plain.load_state_dict(weights)
    train(plain, PlainAdam(adamw(plain), None), 2, 4)
    assert [name for name, weight in plain.state_dict().items() if not torch.equal(found[name], weight)] == []


def test_backward_through_forward_from_before_load_is_refused(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        optimizer.save(tmp_path / "saved")
        loss = gpt_loss(model, 0)
        optimizer.load(tmp_path / "saved")
        with pytest.raises(windlass.OffloadMisuseError, match="before the last step"):
            loss.backward()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_save_to_folder_that_exists_is_refused(tmp_path: Path) -> None:
    with (
        offloaded(seeded(Gpt), tmp_path) as (_, optimizer),
        pytest.raises(FileExistsError, match="save to a new folder"),
    ):
        optimizer.save(tmp_path)


def test_folder_of_other_formats_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt, torch.bfloat16), tmp_path) as (model, optimizer):
        train(model, optimizer, 0, 1)
        optimizer.save(tmp_path / "saved")
        expected = model.state_dict()
    with offloaded(seeded(Gpt, torch.bfloat16), tmp_path, state_precision="bf16") as (model, optimizer):
        before = optimizer.param_groups[0]["lr"]
        with pytest.raises(ValueError, match=r"layers\.0\.safetensors does not fit this model: .*state_precision"):
            optimizer.load(tmp_path / "saved")
        assert optimizer.param_groups[0]["lr"] == before
        assert optimizer.state_dict()["state"] == {}
    assert expected


def test_state_dicts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        train(model, optimizer, 0, 1)
        good = optimizer.state_dict()
        groups = good["param_groups"]
        index = groups[0]["params"][0]
        bad = {**good, "state": {index: {**good["state"][index], "exp_avg": torch.zeros(3)}}}
        with pytest.raises(ValueError, match=r"exp_avg of embedding.weight has shape \(3,\)"):
            optimizer.load_state_dict(bad)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict({"state": {}, "param_groups": groups[:1]})
        with pytest.raises(windlass.CannotOffloadError, match="amsgrad"):
            optimizer.load_state_dict({**good, "param_groups": [{**groups[0], "amsgrad": True}, groups[1]]})
        with pytest.raises(ValueError, match="parameter 99"):
            optimizer.load_state_dict({**good, "state": {99: {}}})
