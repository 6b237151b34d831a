"""A training config passes through JSON unchanged, and unknown fields are refused."""

import json

import pytest

from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.training_config.config_json import from_json, to_json
from windlass.engine.training_config.training_config import EarlyStopping, FinalModel, Schedule, TrainingConfig
from windlass.storage.ids import HeadSlices, Kernel, ModelKernel, Precision, StatePrecision

CONFIG = TrainingConfig(
    batch_size=4,
    num_microbatches=2,
    lanes=2,
    sequence_length=8,
    total_steps=3,
    schedule=Schedule.COSINE,
    precision=Precision.BF16,
    state_precision=StatePrecision.SPLIT,
    update_order=UpdateOrder.KEPT,
    kernel=Kernel.FUSED,
    model_kernels=(ModelKernel.LIGER,),
    head_slices=HeadSlices.SMALL,
    early_stopping=EarlyStopping(patience=2, min_delta=0.5),
    final_model=FinalModel.BEST,
)


@pytest.mark.parametrize("config", [CONFIG, TrainingConfig(batch_size=1, sequence_length=8, total_steps=1)])
def test_config_is_the_same_after_json(config: TrainingConfig) -> None:
    again = from_json(json.loads(json.dumps(to_json(config))))
    assert again == config
    # JSON strings would be equal, but not of the enum's type.
    assert isinstance(again.schedule, Schedule)
    assert isinstance(again.precision, Precision)
    assert isinstance(again.head_slices, HeadSlices)
    assert again.model_kernels is None or isinstance(again.model_kernels[0], ModelKernel)


def test_missing_fields_get_their_defaults() -> None:
    stored = {"batch_size": 1, "sequence_length": 8, "total_steps": 1}
    assert from_json(stored) == TrainingConfig(batch_size=1, sequence_length=8, total_steps=1)


@pytest.mark.parametrize("wrong", [{"ranks": 2}, {"lanes": 3}, {"precision": "fp8"}, {"num_microbatches": 5}])
def test_values_of_no_config_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        from_json(to_json(CONFIG) | wrong)
