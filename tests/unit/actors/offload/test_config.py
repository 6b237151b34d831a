"""The configuration of `windlass.offload` checks its values and names the setting that is wrong."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

import windlass
from tests.support.actors.offload_models import Gpt, adamw, gpt_loss, seeded
from tests.support.training import has_direct_io, keep_calibration

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssd_dirs": []}, r"ssd_dirs is \[\]"),
        ({"ssd_dirs": "/nvme"}, "ssd_dirs is '/nvme'; it must be a list"),
        ({"clip_norm": 0}, "clip_norm is 0; it must be positive"),
        ({"ssd_dirs": [5]}, "ssd_dirs names 5; it must be a list with one directory"),
        ({"clip_norm": "1"}, "clip_norm is '1'; it must be a number"),
        ({"backwards_per_step": 1.5}, r"backwards_per_step is 1\.5; it must be a whole number"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"backwards_per_step": -1}, "backwards_per_step is -1"),
        ({"host_memory_gib": 0.0}, "host_memory_gib is 0.0"),
        ({"optimizer_threads": 0}, "optimizer_threads is 0"),
        ({"deadline_s": -3.0}, "deadline_s is -3.0"),
        ({"chunk_numel": 0}, "chunk_numel is 0"),
        ({"state_precision": "fp8"}, "state_precision is 'fp8'; it must be one of fp32, split, bf16"),
        ({"kernel": "triton"}, "kernel is 'triton'; it must be one of compiled, fused"),
    ],
)
def test_config_with_wrong_value_raises_error_with_field_and_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        windlass.OffloadConfig(**{"ssd_dirs": ["/nvme"], **settings})


def test_config_is_frozen_and_takes_keywords_only() -> None:
    config = windlass.OffloadConfig(ssd_dirs=["/nvme"])
    with pytest.raises(FrozenInstanceError):
        config.clip_norm = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        windlass.OffloadConfig(["/nvme"])  # type: ignore[misc]


def test_offload_with_config_trains_as_with_keywords(tmp_path: Path) -> None:
    losses = []
    for i in range(2):
        ssd_dir = tmp_path / f"ssd{i}"
        keep_calibration(ssd_dir)
        settings: dict[str, Any] = {
            "ssd_dirs": [ssd_dir],
            "kernel": "fused",
            "device": "cpu",
            "direct_io": has_direct_io(tmp_path),
        }
        model = seeded(Gpt)
        if i:
            model, optimizer = windlass.offload(model, adamw(model), windlass.OffloadConfig(**settings))
        else:
            model, optimizer = windlass.offload(model, adamw(model), **settings)
        for step in range(2):
            loss = gpt_loss(model, step)
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
        optimizer.close()
    assert losses[0] == losses[1]


def test_offload_with_config_and_keywords_is_refused() -> None:
    model = Gpt()
    with pytest.raises(TypeError, match="clip_norm"):
        windlass.offload(
            model, torch.optim.AdamW(model.parameters()), windlass.OffloadConfig(ssd_dirs=["/x"]), clip_norm=1
        )
