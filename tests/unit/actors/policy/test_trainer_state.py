import json
import random

import pytest
import torch

from windlass.actors.policy.trainer_state import StepResult, TrainerState


def torchs_state(scaler: torch.amp.GradScaler) -> tuple[float, int]:
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


@pytest.mark.parametrize(("mean_run", "num_steps"), [(3, 300), (900, 9000), (4000, 9000)])
def test_the_loss_scale_is_torchs(mean_run: int, num_steps: int) -> None:
    """Over random runs of good steps between bad ones, some long enough that the scale grows."""
    chance = random.Random(mean_run)
    scaler, trainer = torch.amp.GradScaler("cpu"), TrainerState(scales_loss=True)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scales = set()
    for _ in range(num_steps):
        is_bad = chance.random() < 1 / mean_run
        scaler.scale(parameter)  # the scale is created at its first use
        assert scaler.get_scale() == trainer.next_loss_scale
        parameter.grad = torch.tensor([chance.choice([float("inf"), float("nan")]) if is_bad else 1.0])
        scaler.step(optimizer)
        scaler.update()
        trainer.end_step(StepResult.SKIPPED if is_bad else StepResult.UPDATED)
        assert torchs_state(scaler) == (trainer.loss_scale, trainer.num_good_steps)
        scales.add(trainer.loss_scale)
    assert len(scales) > 2


def test_halves_at_every_bad_step_and_doubles_after_2000_good_ones() -> None:
    trainer = TrainerState(scales_loss=True)
    assert trainer.next_loss_scale == 65536.0
    for scale in (32768.0, 16384.0):
        trainer.end_step(StepResult.SKIPPED)
        assert trainer.next_loss_scale == scale
    for _ in range(1999):
        trainer.end_step(StepResult.UPDATED)
    assert trainer.next_loss_scale == 16384.0
    trainer.end_step(StepResult.UPDATED)
    assert trainer.next_loss_scale == 32768.0
    for _ in range(1999):
        trainer.end_step(StepResult.UPDATED)
    trainer.end_step(StepResult.SKIPPED)  # one step too few for another doubling
    assert trainer.next_loss_scale == 16384.0


def test_counts_updates_and_bad_steps_in_a_row() -> None:
    trainer = TrainerState(scales_loss=False)
    counts = []
    for letter in "uusussu":
        trainer.end_step(StepResult.SKIPPED if letter == "s" else StepResult.UPDATED)
        counts.append((trainer.num_updates, trainer.num_bad_steps))
    assert counts == [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0)]


def test_without_scaling_the_loss_stays_as_it_is() -> None:
    trainer = TrainerState(scales_loss=False)
    for result in (StepResult.SKIPPED, StepResult.UPDATED, StepResult.SKIPPED):
        trainer.end_step(result)
        assert trainer.next_loss_scale == 1.0


def test_trainer_state_restored_equals_saved() -> None:
    chance = random.Random(5)
    trainer = TrainerState(scales_loss=True)
    for _ in range(5000):
        trainer.end_step(StepResult.SKIPPED if chance.random() < 0.0005 else StepResult.UPDATED)
    twin = TrainerState(scales_loss=True)
    assert twin != trainer
    twin.restore(json.loads(json.dumps({**trainer.to_json(), "train_loss": 1.5})))
    assert twin == trainer
    for _ in range(2000):
        for each in (trainer, twin):
            each.end_step(StepResult.UPDATED)
        assert twin == trainer
