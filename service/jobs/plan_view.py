"""A job's plan as users see it: predicted values, measured values, and their difference."""

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from windlass.actors.job import MIN_MEASURED_STEPS
from windlass.amounts import GIB, bytes_text
from windlass.engine.memory_plan import MemoryTier, tokens_in_words
from windlass.planner.predictions import interval_in_words
from windlass.planner.question import JobPlan, PlanReport

_TIERS = tuple(tier.value for tier in MemoryTier)
# Relative difference between the last steps and all steps from which it is told in words.
_MIN_SHOWN_CHANGE = 0.03
_NAMES = {"gpu": "device memory", "host": "host buffers", "ssd": "SSD space"}


def view_of(plan: JobPlan | None, measured: dict[str, Any] | None) -> dict[str, Any]:
    """Makes the API's answer. Without a plan, its fields are null. `measured`: the runner's last measurement."""
    report = dict.fromkeys(field.name for field in fields(PlanReport)) if plan is None else asdict(plan.report)
    simulated = None if plan is None else plan.simulated
    predicted, shown = predicted_of(plan), measured_of(measured)
    return {
        **report,
        "simulated": None if simulated is None else simulated.model_dump(),
        "predicted": predicted,
        "measured": shown,
        "error": _error_of(predicted, shown),
        "is_estimate": _is_estimate(predicted, shown),
        "min_measured_steps": MIN_MEASURED_STEPS,
    }


def predicted_of(plan: JobPlan | None) -> dict[str, Any] | None:
    """Returns the predicted values that can be measured, or None without a plan that fits."""
    if plan is None or not plan.report.feasible:
        return None
    report = plan.report
    return {
        "step_s": report.step_s,
        "step_s_low": report.step_s_low,
        "step_s_high": report.step_s_high,
        "peak_gib": report.engine_gib or dict.fromkeys(_TIERS),
    }


def measured_of(measured: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the measured values with the names of `predicted_of`. A missing one is null."""
    if measured is None:
        return None
    gib = {name: nbytes / GIB for name, nbytes in measured["peak_bytes"].items()}
    return {
        "step_s": measured["step_s"],
        "num_steps": measured["num_steps"],
        "recent": measured.get("recent"),  # missing in measurements of older releases
        "peak_gib": {name: gib.get(name) for name in _TIERS},
        "gpu_reserved_gib": gib.get("gpu_reserved"),
    }


def _is_estimate(predicted: dict[str, Any] | None, measured: dict[str, Any] | None) -> bool | None:
    """Returns whether too few steps were measured to judge the prediction, or None without a prediction."""
    if predicted is None:
        return None
    return measured is None or measured["num_steps"] < MIN_MEASURED_STEPS


def _error_of(predicted: dict[str, Any] | None, measured: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the relative errors: measured over predicted, minus one."""
    if predicted is None or measured is None:
        return None
    peaks = {name: _error(predicted["peak_gib"][name], measured["peak_gib"][name]) for name in _TIERS}
    return {
        "step_s": _error(predicted["step_s"], measured["step_s"]),
        "recent_step_s": _error(predicted["step_s"], (measured["recent"] or {}).get("step_s")),
        "peak_gib": peaks,
    }


def _error(predicted: float | None, measured: float | None) -> float | None:
    return measured / predicted - 1 if measured is not None and predicted else None


def in_words(view: dict[str, Any]) -> dict[str, str]:
    """Describes each predicted or measured number, and the difference, for users."""
    predicted, measured, error = (view[name] or {} for name in ("predicted", "measured", "error"))
    if not predicted and view["simulated"] is not None:  # of a job over several boxes
        predicted = {"step_s": view["simulated"]["step_s"]}
        error = {"step_s": _error(predicted["step_s"], measured.get("step_s"))}
    lines = {"step time": _step_in_words(predicted, measured, error)}
    # Once steps are measured, they say more than earlier jobs.
    if predicted.get("step_s_low") is not None and (view["is_estimate"] or not measured):
        low_s, high_s, compared = predicted["step_s_low"], predicted["step_s_high"], view["num_compared"]
        lines["step time"] += f"; {interval_in_words(low_s, high_s, view['times_from'], compared)}"
    if lines["step time"] and view["is_estimate"]:
        lines["step time"] += f"; an estimate until {MIN_MEASURED_STEPS} steps are measured"
    if (tokens := view.get("example_tokens")) is not None:
        lines["planned for"] = tokens_in_words(tokens)
    for tier, name in _NAMES.items():
        peak_gib = ((values.get("peak_gib") or {}).get(tier) for values in (predicted, measured, error))
        lines[name] = _line(lambda gib: bytes_text(gib * GIB), *peak_gib)
    return {name: line for name, line in lines.items() if line}


def _step_in_words(predicted: dict[str, Any], measured: dict[str, Any], error: dict[str, Any]) -> str:
    """Describes the step time. The last steps are told apart if their time differs from that of all."""
    line = _line("{:.3g} s".format, *(values.get("step_s") for values in (predicted, measured, error)))
    recent, mean_s = measured.get("recent") or {}, measured.get("step_s")
    if not mean_s or not recent or abs(recent["step_s"] / mean_s - 1) < _MIN_SHOWN_CHANGE:
        return line
    line += f"; the last {recent['num_steps']} steps {recent['step_s']:.3g} s"
    if recent["step_s_low"] is not None:
        line += f", the next ones likely {recent['step_s_low']:.3g} to {recent['step_s_high']:.3g} s"
    return line


def _line(text: Callable[[float], str], predicted: float | None, measured: float | None, error: float | None) -> str:
    parts = []
    if predicted is not None:
        parts.append(f"predicted {text(predicted)}")
    if measured is not None:
        parts.append(f"measured {text(measured)}")
    if error is None:
        return ", ".join(parts)
    # From twice as much on, a factor is clearer than a percentage.
    return ", ".join(parts) + (f" ({error:+.1%})" if error < 1 else f" ({1 + error:.3g} times as much)")
