"""What "auto" means, in numbers."""

from dataclasses import replace
from typing import Any

import pytest

from windlass.actors.job_spec import Initialization, Schedule
from windlass.service.hyperparameters import (
    JobSettings,
    SupervisedHyperparameters,
    WindlassSettings,
    num_steps,
    resolve,
)
from windlass.storage.ids import Precision


def settings(windlass: dict[str, Any] | None = None, **supervised: Any) -> JobSettings:
    return JobSettings(
        supervised=SupervisedHyperparameters(**supervised), windlass=WindlassSettings(**(windlass or {})), seed=7
    )


def test_silence_means_the_documented_defaults() -> None:
    resolved = resolve(settings(), num_examples=1000)
    assert (resolved.epochs, resolved.batch_size, resolved.num_microbatches) == (3, 8, 2)
    assert (resolved.learning_rate, resolved.schedule, resolved.warmup_steps) == (2e-5, Schedule.LINEAR, 12)  # of 375
    assert (resolved.weight_decay, resolved.clip_norm) == (0.0, 1.0)
    assert (resolved.beta1, resolved.beta2, resolved.epsilon) == (0.9, 0.999, 1e-8)
    assert (resolved.precision, resolved.sequence_length, resolved.seed) == (Precision.BF16, 2048, 7)
    assert settings().initialization is Initialization.WEIGHTS


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
    }
    resolved = resolve(settings(asked), num_examples=10)
    assert (resolved.epochs, resolved.batch_size, resolved.num_microbatches) == (5, 4, 3)
    assert (resolved.sequence_length, resolved.learning_rate, resolved.warmup_steps) == (64, 1e-3, 8)  # of 15
    assert (resolved.schedule, resolved.weight_decay) == (Schedule.COSINE, 0.1)
    assert (resolved.clip_norm, resolved.precision) == (None, Precision.FP32)
    assert resolve(settings({"warmup_steps": 10**6}), 10).warmup_steps == num_steps(3, 8, 10)


def test_what_a_row_keeps_resolves_to_the_same() -> None:
    asked = settings({"epochs": 2, "budgets": {"host_memory_gib": 4}}, learning_rate_multiplier=3)
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
    ],
)
def test_contradictions_are_refused(windlass: dict[str, Any], supervised: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(windlass, **supervised)


def test_a_small_batch_has_no_empty_microbatches() -> None:
    resolved = resolve(settings({"num_microbatches": 8}), num_examples=3)
    assert (resolved.batch_size, resolved.num_microbatches) == (3, 3)
    assert replace(resolved, num_microbatches=1) != resolved
