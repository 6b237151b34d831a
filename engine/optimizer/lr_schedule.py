"""Learning rate schedules: linear warm-up, then linear or cosine decay to zero, or a constant rate."""

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int, schedule: str) -> float:
    """Returns the learning rate of `step`, counted from 1. `schedule`: "linear", "cosine" or "constant".

    Source: transformers, get_*_schedule_with_warmup, where steps count from 0.
    """
    done = step - 1
    if done < warmup_steps:
        return peak * done / warmup_steps
    progress = (done - warmup_steps) / max(1, total_steps - warmup_steps)
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak * max(0.0, 1.0 - progress)
        case "cosine":
            return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    raise ValueError(f"schedule is {schedule!r}; it must be linear, cosine or constant")
