"""Kept shapes are reused for the same model, and for no other."""

from typing import Any

from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.question.kept_shapes import KeptShapes, ModelShapes
from windlass.storage.ids import HeadSlices, Precision


def shapes_of(kept: KeptShapes, precision: Precision = Precision.BF16, **changes: Any) -> ModelShapes:
    shape = ModelShape(**{"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 100} | changes)
    return kept.of(ShapeConfig(shape=shape, num_tokens=32), precision, None)


def test_profile_of_a_known_shape_is_the_one_made_before() -> None:
    kept = KeptShapes()
    profile = shapes_of(kept).profile(2, 32, for_gpu=True, head_slices=HeadSlices.LARGE)
    assert shapes_of(kept).profile(2, 32, for_gpu=True, head_slices=HeadSlices.LARGE) is profile
    others = [
        shapes_of(kept).profile(1, 32, for_gpu=True, head_slices=HeadSlices.LARGE),
        shapes_of(kept).profile(2, 32, for_gpu=False, head_slices=HeadSlices.LARGE),
        shapes_of(kept).profile(2, 32, for_gpu=True, head_slices=HeadSlices.SMALL),
        shapes_of(kept, num_layers=3).profile(2, 32, for_gpu=True, head_slices=HeadSlices.LARGE),
        shapes_of(kept, Precision.FP32).profile(2, 32, for_gpu=True, head_slices=HeadSlices.LARGE),
    ]
    assert all(other is not profile for other in others)
    assert shapes_of(KeptShapes()) is not shapes_of(kept)


def test_models_that_were_not_planned_for_longest_are_forgotten() -> None:
    kept = KeptShapes()
    first, second = shapes_of(kept, num_layers=1), shapes_of(kept, num_layers=2)
    assert shapes_of(kept, num_layers=1) is first
    for num_layers in range(3, 10):
        shapes_of(kept, num_layers=num_layers)
    assert shapes_of(kept, num_layers=1) is first
    assert shapes_of(kept, num_layers=2) is not second
