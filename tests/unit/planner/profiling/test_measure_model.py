"""Times of a model's blocks on this device."""

import pytest
import torch

from tests.support.engine.architectures import ARCHITECTURES
from windlass.planner.profiling import measure_model
from windlass.planner.profiling.measure_model import measure_blocks, with_times
from windlass.planner.profiling.model_profiler import profile_config
from windlass.storage.ids import Precision

QUICK = {("Qwen2", True), ("Mixtral", False)}


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        pytest.param(name, tied, marks=[] if (name, tied) in QUICK else [pytest.mark.long])
        for name in ("Qwen2", "Mixtral", "GPT-2")
        for tied in (False, True)
    ],
)
def test_every_block_has_its_times(name: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_model, "_MAX_S", 0.1)  # precision does not matter here
    config = ARCHITECTURES[name].config(tied=tied, dropout=0.0)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=16)
    measured = measure_blocks(profile, config, Precision.BF16, torch.device("cpu"))
    assert measured.standard_error >= 0
    timed = with_times(profile, measured.times)
    for block in timed.blocks[:-1]:
        assert block.forward_s is not None
        assert block.backward_s is not None
        assert block.forward_s > 0
        assert block.backward_s > 0
    assert timed.head.forward_s is not None
    assert timed.head.forward_s > 0
    assert timed.head.backward_s == 0
    again = timed.layers[0].again
    assert again is not None
    assert min(again.all_s, again.one_held_s, again.most_held_s) >= 0
    assert timed.layers[0] == timed.layers[-1]  # measured once
    assert timed.numel == profile.numel


def test_slow_block_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_model, "_LONG_S", 0.0)
    config = ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.0)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=16)
    measured = measure_blocks(profile, config, Precision.BF16, torch.device("cpu"))
    assert measured.standard_error == 0
    timed = with_times(profile, measured.times)
    assert all(layer.forward_s and layer.again is None for layer in timed.layers)
