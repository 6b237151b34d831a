"""Stands in for the measurement of a model's blocks, which takes seconds."""

import pytest

from windlass.engine.device import malloc
from windlass.planner.cost.model_profile import ModelProfile
from windlass.planner.profiling import measure_model
from windlass.planner.profiling.block_times import BlockTimes, MeasuredBlocks


def pretend_to_measure(monkeypatch: pytest.MonkeyPatch) -> list[ModelProfile]:
    """Gives all blocks the same times. Returns the list to which each measured model is added."""
    measured: list[ModelProfile] = []

    def measure(profile: ModelProfile, *_: object, **__: object) -> MeasuredBlocks:
        measured.append(profile)
        times = BlockTimes(forward_s=0.25, backward_s=0.5)
        return MeasuredBlocks(times=dict.fromkeys(range(len(profile.layers) + 2), times), standard_error=0.0)

    monkeypatch.setattr(measure_model, "measure_blocks", measure)
    monkeypatch.setattr(malloc, "retain_freed_memory", lambda: None)
    return measured
