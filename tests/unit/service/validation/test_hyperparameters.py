"""The values of "auto" settings."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from pydantic import ValidationError

from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.optimizer.lr_schedule import learning_rate
from windlass.engine.training_config.training_config import (
    NUMERICS,
    Initialization,
    Optimizer,
    Schedule,
    TrainingConfig,
)
from windlass.service.validation.hyperparameters import (
    GREATEST_MICROBATCH_SIZE,
    JobSettings,
    SupervisedHyperparameters,
    TooFewMicrobatchesError,
    WindlassSettings,
    default_microbatches,
    num_steps,
    resolve,
)
from windlass.storage.ids import Precision, StatePrecision


def settings(windlass: dict[str, Any] | None = None, **supervised: Any) -> JobSettings:
    return JobSettings(
        supervised=SupervisedHyperparameters(**supervised), windlass=WindlassSettings(**(windlass or {})), seed=7
    )


def test_resolve_without_settings_gives_documented_defaults() -> None:
    resolved = resolve(settings(), num_examples=1000)
    assert (resolved.epochs, resolved.batch_size, resolved.num_microbatches) == (3, 8, 2)
    assert (resolved.learning_rate, resolved.schedule, resolved.warmup_steps) == (2e-5, Schedule.LINEAR, 12)  # of 375
    assert (resolved.weight_decay, resolved.clip_norm) == (0.0, 1.0)
    assert (resolved.beta1, resolved.beta2, resolved.epsilon) == (0.9, 0.999, 1e-8)
    assert (resolved.precision, resolved.sequence_length, resolved.seed) == (Precision.BF16, 2048, 7)
    assert (resolved.optimizer, resolved.state_precision) == (Optimizer.ADAMW, StatePrecision.FP32)
    assert (resolved.accumulation_precision, resolved.max_bad_steps) == (Precision.FP32, 10)
    assert resolved.update_order is UpdateOrder.KEPT  # because the gradient is clipped
    assert resolved.model_kernels is None  # those that the device supports
    assert settings().initialization is Initialization.WEIGHTS


def test_our_defaults_are_those_of_older_jobs() -> None:
    """A stored job has the defaults for missing settings, whether it was prepared or not."""
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}
    stored = {"batch_size": None, "schedule": "cosine", "clip_norm": None, "precision": "fp32", "optimizer": "adamw"}
    again = JobSettings.from_row(method, stored | {"state_precision": "fp32", "initialization": "random"}, 7)
    asked = {"schedule": "cosine", "clip_norm": None, "precision": "fp32", "initialization": "random"}
    assert again == settings(asked, n_epochs=2)
    resolved = resolve(settings(), num_examples=10)
    later = ("optimizer", "state_precision", "accumulation_precision", "max_bad_steps")
    older = {name: value for name, value in asdict(resolved).items() if name not in (*later, "update_order")}
    loaded = TrainingConfig(**older)
    assert replace(loaded, update_order=loaded.order_of_updates) == resolved


def test_a_model_can_be_kept_to_torchs_own_kernels() -> None:
    assert resolve(settings({"model_kernels": "torch"}), num_examples=10).model_kernels == ()


@pytest.mark.parametrize(("num_examples", "batch_size"), [(3, 3), (8, 8), (4000, 8), (10_000, 20), (10**6, 64)])
def test_auto_batch_size_follows_the_data(num_examples: int, batch_size: int) -> None:
    assert resolve(settings(), num_examples).batch_size == batch_size


def test_openai_s_three_are_obeyed() -> None:
    resolved = resolve(settings(n_epochs=2, batch_size=16, learning_rate_multiplier=0.5), num_examples=100)
    assert (resolved.epochs, resolved.batch_size, resolved.learning_rate) == (2, 16, 1e-5)


def test_ours_are_obeyed() -> None:
    asked = {
        "epochs": 5,
        "batch_size": 4,
        "num_microbatches": 3,
        "sequence_length": 64,
        "learning_rate": 1e-3,
        "warmup": 0.5,
        "schedule": "cosine",
        "weight_decay": 0.1,
        "clip_norm": None,
        "precision": "fp32",
        "optimizer": "adam",
        "beta1": 0,
        "beta2": 0.95,
        "epsilon": 1e-6,
        "gradient_updates": "after_backward",
        "max_bad_steps": 0,
    }
    resolved = resolve(settings(asked), num_examples=10)
    assert (resolved.epochs, resolved.batch_size, resolved.num_microbatches) == (5, 4, 3)
    assert (resolved.sequence_length, resolved.learning_rate, resolved.warmup_steps) == (64, 1e-3, 8)  # of 15
    assert (resolved.schedule, resolved.weight_decay) == (Schedule.COSINE, 0.1)
    assert (resolved.clip_norm, resolved.precision) == (None, Precision.FP32)
    assert (resolved.optimizer, resolved.update_order) == (Optimizer.ADAM, UpdateOrder.AFTER_BACKWARD)
    assert (resolved.beta1, resolved.beta2, resolved.epsilon, resolved.max_bad_steps) == (0, 0.95, 1e-6, 0)
    assert resolve(settings({"warmup_steps": 10**6}), 10).warmup_steps == num_steps(3, 8, 10)


@pytest.mark.parametrize(("total_steps", "warmup_steps"), [(1, 0), (2, 1), (3, 1), (33, 1), (34, 2), (375, 12)])
def test_default_warmup_leaves_a_step_that_learns(total_steps: int, warmup_steps: int) -> None:
    hyper = resolve(settings({"epochs": 1, "batch_size": 1}), num_examples=total_steps)
    assert hyper.warmup_steps == warmup_steps < total_steps
    rates = [
        learning_rate(
            step,
            peak=hyper.learning_rate,
            warmup_steps=hyper.warmup_steps,
            total_steps=total_steps,
            schedule=hyper.schedule,
        )
        for step in range(1, total_steps + 1)
    ]
    assert max(rates) == hyper.learning_rate


@pytest.mark.parametrize("asked", [{"warmup": 0.03}, {"warmup": 1.0}, {"warmup_steps": 1}])
def test_asked_for_warmup_stays_as_given_even_where_it_is_all_of_a_job(asked: dict[str, Any]) -> None:
    assert resolve(settings({"epochs": 1, **asked}), num_examples=1).warmup_steps == 1


@pytest.mark.parametrize(
    ("precision", "states", "sums"),
    [
        ("bf16", "fp32", "fp32"),
        ("bf16", "split", "bf16"),
        ("bf16", "bf16", "bf16"),
        ("fp16", "fp32", "fp16"),
        ("fp16", "fp32", "fp32"),
        ("fp32", "fp32", "fp32"),
    ],
)
def test_number_formats_that_go_together(precision: str, states: str, sums: str) -> None:
    asked = {"precision": precision, "state_precision": states, "accumulation_precision": sums}
    resolved = resolve(settings(asked), num_examples=10)
    assert {name: value for name, value in asdict(resolved).items() if name in asked} == asked
    assert resolved.formats.itemsizes


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        ({"clip_norm": None}, UpdateOrder.ACTIVE),
        ({"clip_norm": None, "precision": "fp32"}, UpdateOrder.ACTIVE),
        ({"clip_norm": None, "gradient_updates": "active"}, UpdateOrder.ACTIVE),
        ({"clip_norm": None, "gradient_updates": "kept"}, UpdateOrder.KEPT),
        ({"clip_norm": None, "precision": "fp16"}, UpdateOrder.KEPT),
        ({"clip_norm": 0.5, "gradient_updates": "auto"}, UpdateOrder.KEPT),
    ],
)
def test_updates_begin_as_early_as_they_may(asked: dict[str, Any], order: UpdateOrder) -> None:
    assert resolve(settings(asked), num_examples=10).update_order is order


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["learning_rate", "warmup", "weight_decay", "clip_norm", "beta1", "beta2", "epsilon", "max_bad_steps"]
)
def test_numbers_are_finite(name: str, number: float) -> None:
    with pytest.raises(ValidationError, match=rf"{name}\n.*(finite number|valid integer)"):
        WindlassSettings(**{name: number})


def test_stored_settings_resolve_to_the_same() -> None:
    others = {"precision": "fp16", "accumulation_precision": "fp16", "optimizer": "adam", "gradient_updates": "kept"}
    asked = settings({"epochs": 2, "budgets": {"host_memory_gib": 4}, **others}, learning_rate_multiplier=3)
    again = JobSettings.from_row(
        {"type": "supervised", "supervised": {"hyperparameters": asked.supervised.model_dump(mode="json")}},
        asked.windlass.model_dump(mode="json"),
        asked.seed,
    )
    assert again == asked
    assert resolve(again, 50) == resolve(asked, 50)


def test_no_example_is_left_out() -> None:
    assert num_steps(2, 4, 9) == 6
    with pytest.raises(ValueError, match="at least one example"):
        num_steps(2, 4, 0)


@pytest.mark.parametrize(
    ("windlass", "supervised", "message"),
    [
        ({"epochs": 2}, {"n_epochs": 3}, "windlass.epochs is 2 but .* say 3"),
        ({"batch_size": 2}, {"batch_size": 4}, "windlass.batch_size is 2 but .* say 4"),
        ({"learning_rate": 1e-4}, {"learning_rate_multiplier": 2}, "not both"),
        ({"batch_size": 2, "num_microbatches": 3}, {}, "a batch has only 2 examples"),
        ({"num_microbatches": 9}, {"batch_size": 8}, "a batch has only 8 examples"),
        ({"lanes": 9}, {"batch_size": 8}, "lanes is 9, but a batch has only 8 examples"),
        ({"num_microbatches": 2, "lanes": 3}, {}, "lanes is 3, and a step has 2 micro-batches"),
    ],
)
def test_contradictions_are_refused(windlass: dict[str, Any], supervised: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(windlass, **supervised)


@pytest.mark.parametrize(
    ("asked", "lanes", "num_microbatches"),
    [
        ({}, 1, 2),
        ({"lanes": "auto"}, 1, 2),
        ({"lanes": 2}, 2, 2),
        ({"lanes": 5}, 5, 5),  # no number of micro-batches is asked for, so there are enough
        ({"lanes": 3, "num_microbatches": 4}, 3, 4),
        ({"lanes": 3, "batch_size": 16}, 3, 6),  # four would be enough, but the lanes would be unequal
        ({"lanes": 4, "batch_size": 64}, 4, 16),
        ({"lanes": 16, "batch_size": 17}, 16, 16),
    ],
)
def test_lanes_are_one_unless_asked_for_and_equal_unless_micro_batches_are_asked_for_too(
    asked: dict[str, Any], lanes: int, num_microbatches: int
) -> None:
    resolved = resolve(settings(asked), num_examples=100)
    assert (resolved.lanes, resolved.num_microbatches, resolved.numerics) == (lanes, num_microbatches, NUMERICS)


def test_default_micro_batches_are_equal_in_all_lanes_and_no_more_than_examples() -> None:
    for batch_size in range(1, 65):
        for lanes in range(1, batch_size + 1):
            number = default_microbatches(batch_size, lanes, 1)
            assert number % lanes == 0
            assert lanes <= number <= batch_size
            assert -(-batch_size // number) <= GREATEST_MICROBATCH_SIZE
        assert default_microbatches(batch_size, 1, 1) == -(-batch_size // GREATEST_MICROBATCH_SIZE)


@pytest.mark.parametrize(
    ("batch_size", "lanes", "gpus", "expected"),
    [
        (8, 1, 3, 3),
        (20, 1, 4, 8),  # five would be enough, but one GPU would have two and the others one
        (64, 1, 3, 18),
        (64, 3, 2, 18),
        (40, 4, 6, 12),
        (8, 2, 3, 6),
        (5, 2, 3, 4),  # six would be more than five examples: as many in each lane at least
        (3, 2, 3, 3),  # four would be more than three examples
    ],
)
def test_default_micro_batches_are_enough_and_equal_for_all_gpus(
    batch_size: int, lanes: int, gpus: int, expected: int
) -> None:
    assert default_microbatches(batch_size, lanes, gpus) == expected


@pytest.mark.parametrize("asked", [{}, {"num_microbatches": 6}])
def test_more_lanes_than_the_data_gives_micro_batches_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(
        TooFewMicrobatchesError, match="lanes is 6, and 5 training examples give batches of 5 in 5 micro-"
    ):
        resolve(settings({"lanes": 6, **asked}), num_examples=5)


@pytest.mark.parametrize(
    ("asked", "lanes", "num_microbatches"),
    [
        ({"gpus": 2}, 1, 2),
        ({"gpus": 5}, 1, 5),  # each GPU computes a micro-batch at least
        ({"gpus": 4, "lanes": 2}, 2, 4),
        ({"gpus": 2, "lanes": 3, "num_microbatches": 4}, 3, 4),
        ({"gpus": 4, "accumulation_precision": "bf16"}, 1, 4),
    ],
)
def test_gpus_give_enough_micro_batches_and_no_lanes(asked: dict[str, Any], lanes: int, num_microbatches: int) -> None:
    resolved = resolve(settings(asked), num_examples=100)
    assert (resolved.lanes, resolved.num_microbatches) == (lanes, num_microbatches)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpus": 9, "batch_size": 8}, "windlass.gpus is 9, but a batch has only 8 examples: each GPU needs"),
        ({"gpus": 3, "num_microbatches": 2}, "windlass.gpus is 3, but num_microbatches is 2: each GPU needs"),
    ],
)
def test_more_gpus_than_micro_batches_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(TooFewMicrobatchesError, match=message) as refused:
        settings(asked)
    assert refused.value.param == "windlass.gpus"


def test_more_gpus_than_the_data_gives_micro_batches_are_refused() -> None:
    with pytest.raises(
        TooFewMicrobatchesError, match="gpus is 6, and 5 training examples give batches of 5"
    ) as refused:
        resolve(settings({"gpus": 6}), num_examples=5)
    assert refused.value.param == "windlass.gpus"


@pytest.mark.parametrize(
    ("asked", "num_devices", "lanes", "num_microbatches"),
    [
        ({}, 4, 1, 4),
        ({}, 1, 1, 2),
        ({"num_microbatches": 2}, 4, 1, 2),  # more than two GPUs would have nothing to compute
        ({"batch_size": 3}, 8, 1, 3),
        ({"lanes": 3}, 4, 3, 6),
        ({"accumulation_precision": "bf16"}, 4, 1, 4),
    ],
)
def test_settings_of_a_job_whose_plan_chooses_gpus_follow_from_the_most_that_it_may_get(
    asked: dict[str, Any], num_devices: int, lanes: int, num_microbatches: int
) -> None:
    chosen = settings({"gpus": "auto", **asked})
    resolved = resolve(chosen, num_examples=100, num_devices=num_devices)
    assert (resolved.lanes, resolved.num_microbatches) == (lanes, num_microbatches)
    assert chosen.windlass.least_gpus == 1


@pytest.mark.parametrize("gpus", [0, 17, 1.5, "2", None])
def test_number_of_gpus_is_limited(gpus: Any) -> None:
    with pytest.raises(ValueError, match="gpus"):
        settings({"gpus": gpus})


def test_a_small_batch_has_no_empty_microbatches() -> None:
    resolved = resolve(settings({"num_microbatches": 8}), num_examples=3)
    assert (resolved.batch_size, resolved.num_microbatches) == (3, 3)
    assert replace(resolved, num_microbatches=1) != resolved


def test_keep_checkpoints_without_checkpoints_is_refused() -> None:
    for asked in ({"checkpoint_every": 5}, {"checkpoint_minutes": 0.5}):
        assert WindlassSettings(keep_checkpoints=1, **asked).keep_checkpoints == 1
    with pytest.raises(ValidationError, match="there are none to keep"):
        WindlassSettings(keep_checkpoints=1)
