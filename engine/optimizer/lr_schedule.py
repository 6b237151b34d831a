"""Learning rate of a step: linear warm-up, then linear or cosine decay to zero, or none."""

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int, schedule: str) -> float:
    """Rate of `step`, counted from 1. `schedule`: "linear", "cosine" or "constant".

    As in transformers' get_*_schedule_with_warmup, whose step counts from 0.
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
