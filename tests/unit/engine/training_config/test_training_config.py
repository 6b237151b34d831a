"""Settings that no training can have are refused, and the decisions about gradients follow from the settings."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.training_config.training_config import TrainingConfig
from windlass.storage.ids import Precision, StatePrecision

CONFIG = TrainingConfig(batch_size=4, num_microbatches=2, sequence_length=8, total_steps=3, clip_norm=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"num_microbatches": 5}, "a batch has only 4 examples"),
        ({"lanes": 0}, "lanes is 0"),
        ({"num_microbatches": 2, "lanes": 3}, "lanes is 3, and a step has 2 micro-batches"),
        ({"lanes": 2, "accumulation_precision": Precision.BF16}, "lanes are summed in fp32"),
        ({"lanes": 2, "numerics": 1}, "lanes is 2, but jobs of numerics 1 have one lane"),
        ({"numerics": 3}, "numerics is 3, and this release knows 1, 2"),
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"total_steps": 0}, "total_steps is 0"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"beta2": -0.1}, "beta2 -0.1"),
        ({"epsilon": 0.0}, "epsilon 0.0"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"precision": Precision.FP32, "state_precision": StatePrecision.SPLIT}, "split"),
        ({"accumulation_precision": Precision.FP16}, "fp16 sums do not go with precision bf16"),
        ({"update_order": UpdateOrder.ACTIVE, "clip_norm": 1.0}, "with clip_norm 1.0 every gradient must be known"),
        ({"update_order": UpdateOrder.NAIVE, "precision": Precision.FP16}, "with precision fp16 every gradient"),
    ],
)
def test_config_of_no_possible_training_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("changes", "committed", "can_follow"),
    [
        ({}, 2, True),
        ({}, 1, True),  # with one lane both versions have the same bits
        ({}, 3, False),
        ({}, 0, False),
        ({"lanes": 2}, 2, True),
        ({"lanes": 2}, 1, False),
        ({"numerics": 1}, 1, True),
        ({"numerics": 1}, 2, False),  # the commit may have been made with several lanes
    ],
)
def test_commits_of_other_numerics_are_followed_only_with_the_same_bits(
    changes: dict[str, Any], committed: int, can_follow: bool
) -> None:
    assert replace(CONFIG, **changes).can_follow(committed) is can_follow


@pytest.mark.parametrize(
    ("changes", "order"),
    [
        ({}, UpdateOrder.ACTIVE),
        ({"clip_norm": 1.0}, UpdateOrder.KEPT),
        ({"precision": Precision.FP16}, UpdateOrder.KEPT),
        ({"update_order": UpdateOrder.NAIVE}, UpdateOrder.NAIVE),
        ({"update_order": UpdateOrder.AFTER_BACKWARD, "clip_norm": 1.0}, UpdateOrder.AFTER_BACKWARD),
    ],
)
def test_order_of_updates_is_the_fastest_exact_one_unless_named(changes: dict[str, Any], order: UpdateOrder) -> None:
    config = replace(CONFIG, **changes)
    assert config.order_of_updates is order
    assert config.keeps_grads is order.keeps_grads


@pytest.mark.parametrize(
    ("changes", "precision", "itemsize"),
    [
        ({}, Precision.FP32, 4),
        ({"accumulation_precision": Precision.BF16}, Precision.BF16, 2),
        ({"num_microbatches": 1}, Precision.BF16, 2),
        ({"precision": Precision.FP32, "num_microbatches": 1}, Precision.FP32, 4),
    ],
)
def test_only_sums_over_microbatches_have_the_accumulation_precision(
    changes: dict[str, Any], precision: Precision, itemsize: int
) -> None:
    config = replace(CONFIG, **changes)
    assert (config.grad_precision, config.grad_itemsize) == (precision, itemsize)


def test_microbatch_size_is_that_of_the_largest_microbatch() -> None:
    assert replace(CONFIG, batch_size=7, num_microbatches=2).microbatch_size == 4


def test_config_pickles_whole() -> None:
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG
