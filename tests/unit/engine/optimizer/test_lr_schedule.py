import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from windlass.engine.optimizer.lr_schedule import learning_rate

PEAK = 3e-4


def library_rates(schedule: str, warmup_steps: int, total_steps: int) -> list[float]:
    """The rate of each step by transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    match schedule:
        case "linear":
            scheduler = get_linear_schedule_with_warmup(optimizer, warmup_steps, total_steps)
        case "cosine":
            scheduler = get_cosine_schedule_with_warmup(optimizer, warmup_steps, total_steps)
        case _:
            scheduler = get_constant_schedule_with_warmup(optimizer, warmup_steps)
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (0, 10), (3, 30), (10, 10), (1, 2), (20, 10)])
def test_it_is_transformers_schedule(schedule: str, warmup_steps: int, total_steps: int) -> None:
    found = [
        learning_rate(step, peak=PEAK, warmup_steps=warmup_steps, total_steps=total_steps, schedule=schedule)
        for step in range(1, total_steps + 1)
    ]
    assert found == pytest.approx(library_rates(schedule, warmup_steps, total_steps), rel=1e-12, abs=1e-18)


@given(
    warmup_steps=st.integers(0, 50),
    total_steps=st.integers(1, 200),
    step=st.integers(1, 400),
    schedule=st.sampled_from(["linear", "cosine", "constant"]),
)
def test_it_stays_between_zero_and_the_peak(warmup_steps: int, total_steps: int, step: int, schedule: str) -> None:
    rate = learning_rate(step, peak=PEAK, warmup_steps=warmup_steps, total_steps=total_steps, schedule=schedule)
    assert 0.0 <= rate <= PEAK


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule is 'step'; it must be linear, cosine or constant"):
        learning_rate(1, peak=PEAK, warmup_steps=0, total_steps=10, schedule="step")
