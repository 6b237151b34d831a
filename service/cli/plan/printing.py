"""Printing of a plan in words, and of what it is compared with."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from windlass.amounts import GIB, bytes_text, least_gib, number_text
from windlass.engine.memory_plan import tokens_in_words
from windlass.service.cli import print_columns
from windlass.service.validation import WindlassSettings

if TYPE_CHECKING:
    from windlass.planner.planning import Comparison
    from windlass.planner.question import PlanReport, WhatIf
    from windlass.planner.solver import Goal


# The resources of a step in words.
_BUSY = {
    "compute": "device",
    "h2d": "copies to the device",
    "d2h": "copies from the device",
    "ssd": "SSDs",
    "optimizer": "updates on the CPU",
    "host_memory": "host memory",
}
_TIERS = {"gpu": "GPU memory", "host": "host memory", "ssd": "SSD space"}
_LEGEND = """\
input, rest: what becomes of a layer's input, and of its operators' outputs other than those named as kept or swapped
kept: on the device. swapped: to RAM, then to SSDs. recomputed: computed again in the backward pass"""


def print_job_settings(model: str, job_settings: dict[str, Any], *, is_open: bool) -> None:
    """Prints the command for the planned job. `is_open`: the user did not choose the number of micro-batches."""
    defaults = WindlassSettings()
    given = {name: value for name, value in job_settings.items() if value != getattr(defaults, name)}
    if not WindlassSettings.model_validate({**given, "gradient_updates": "auto"}).leaves_order_open:
        given.pop("gradient_updates", None)  # only one order is exact, which a job gets by itself
    if job_settings.get("lanes") == defaults.num_lanes:
        given.pop("lanes", None)
    options = " ".join(f"--set {name}={'null' if value is None else value}" for name, value in given.items())
    print(f"a job as planned: windlass submit {model} FILE {options}")
    if is_open:
        print("(a job that names no number of micro-batches gets the fastest one for the lengths of its examples)")


def change_in_words(row: "WhatIf") -> str:
    """Names a change of a job and what it gives, such as "one more GPU, +18%"."""
    return f"{row.change}, {_gain_of(row)}"


def _gain_of(row: "WhatIf") -> str:
    if row.problem is not None:
        return row.problem
    if row.tokens_per_s is None:
        return "does not fit"
    return "it fits" if row.gain is None else f"{row.gain:+.0%}"


def print_what_if(found: "PlanReport") -> None:
    rows: list[tuple[str, ...]] = [("what if", "step, s", "tokens a second", "gain")]
    if found.step_s is not None and found.tokens_per_s is not None:
        rows.append(("as it is", number_text(found.step_s), number_text(found.tokens_per_s, 4), ""))
    else:
        rows.append(("as it is", "-", "-", "does not fit"))
    for row in found.what_if or ():
        if row.step_s is None or row.tokens_per_s is None:
            rows.append((row.change, "-", "-", _gain_of(row)))
        else:
            rows.append((row.change, number_text(row.step_s), number_text(row.tokens_per_s, 4), _gain_of(row)))
    print_columns(rows)
    print("gain: of tokens a second")


def print_comparison(own: "PlanReport", compared: "Comparison") -> None:
    if compared.systems:
        found = ("-", "-", "-", "-", "no")
        if own.step_s is not None and own.tokens_per_s is not None and own.busy_s is not None:
            gpu = f"{own.busy_s['compute'] / own.step_s:.0%}"
            found = (
                number_text(own.step_s),
                number_text(own.tokens_per_s, 4),
                gpu,
                str(own.bottleneck),
                "yes",
            )
        rows = [("system", "step, s", "tokens a second", "GPU busy", "busiest", "fits"), ("windlass", *found)]
        for each in compared.systems:
            lacks = ", ".join(
                f"{bytes_text(int(gib * GIB))} of {_TIERS[memory]}" for memory, gib in each.missing_gib.items()
            )
            fits = f"no: lacks {lacks}" if lacks else "yes"
            gpu = f"{each.gpu_share:.0%}"
            rows.append(
                (
                    each.system,
                    number_text(each.step_s),
                    number_text(each.tokens_per_s, 4),
                    gpu,
                    each.bottleneck,
                    fits,
                )
            )
        print_columns(rows)
    for note in compared.notes:
        print(note)


def print_found(goal: "Goal", number: int, num_params: int, *, longest: int | None = None) -> None:
    """Prints the number that a search has found. `longest`: the largest that the model takes, if that is known."""
    unit = goal.unit.removesuffix("s") if number == 1 else goal.unit
    told = ", as many as the model takes" if number == longest else ""
    print(f"{goal}: {number} {unit}{told} ({num_params / 1e9:.3g} billion parameters)")


def print_report(
    found: "PlanReport",
    *,
    num_steps: int | None = None,
    job_s: float | None = None,
    ssd_write_tb: float | None = None,
    ssd_endurance_percent: float | None = None,
    num_ssds: int = 1,
    is_cpu: bool = False,
) -> None:
    """Prints a plan in words.

    `num_steps`, `job_s`, `ssd_write_tb`, `ssd_endurance_percent`: see `totals_of_job`; None: not known. `num_ssds`,
    `is_cpu`: of the planned machine.
    """
    if not found.feasible:
        print("it does not fit:")
        for reason in found.reasons:
            print(f"  {reason}")
        _print_least_gpu(found)
        return
    numbers = asdict(found)
    step, bound = number_text(numbers["step_s"]), number_text(numbers["bound_s"])
    print_columns(
        [
            ("step", f"{step} s; resources, and work that cannot overlap, take at least {bound} s"),
            ("how sure", _interval(found)),
            *_job_time(num_steps, job_s),
            *_job_wear(ssd_write_tb, ssd_endurance_percent, num_ssds),
            ("tokens a second", number_text(numbers["tokens_per_s"], 4)),
            ("model's TFLOPS", number_text(numbers["tflops"], 4)),
            ("written to SSDs a step", f"{number_text(numbers['ssd_write_gb_per_step'], 4)} GB"),
            *_peaks(found, is_cpu=is_cpu),
            *((f"busy: {_BUSY.get(name, name)}", f"{number_text(each)} s") for name, each in numbers["busy_s"].items()),
        ]
    )
    print()
    activations = numbers["choices"]["activations"]
    print_columns(list(_choices(numbers["choices"], is_cpu=is_cpu)))
    print()
    rows = [("layers", "input", "rest", "kept", "swapped")]
    rows += [
        (each["layers"], each["input"], each["rest"], *(_names(each.get(key, ())) for key in ("kept", "swapped")))
        for each in activations
    ]
    print_columns(rows)
    print(_LEGEND)
    print()
    for reason in found.reasons:
        print(reason)
    _print_least_gpu(found)
    print(f"planned for {tokens_in_words(numbers['example_tokens'])}")


def _interval(found: "PlanReport") -> str:
    from windlass.planner.predictions import interval_in_words

    assert found.step_s_low is not None, "it is a new plan"
    assert found.step_s_high is not None, "it is a new plan"
    return interval_in_words(found.step_s_low, found.step_s_high, found.times_from or "", found.num_compared or 0)


def _print_least_gpu(found: "PlanReport") -> None:
    if found.least_gpu_gib is not None:
        gib = least_gib(found.least_gpu_gib * GIB)
        print(f"the least GPU memory for this job is {gib} GiB: {found.least_gpu_reason}")


def _job_time(num_steps: int | None, job_s: float | None) -> Iterator[tuple[str, str]]:
    if num_steps is not None and job_s is not None:
        hours = f"{number_text(job_s / 3600)} hours" if job_s >= 3600 else f"{number_text(job_s / 60)} minutes"
        yield "the whole job", f"{hours} for {num_steps:,} steps, without loading and evaluations"


def _peaks(found: "PlanReport", *, is_cpu: bool) -> Iterator[tuple[str, str]]:
    assert found.peak_limit_gib is not None, "it is a new plan"
    for tier, gib in (found.peak_gib or {}).items():
        name = "device memory, in RAM" if is_cpu and tier == "gpu" else _TIERS[tier]
        yield f"peak of {name}", f"{gib:.2f} of {found.peak_limit_gib[tier]:.2f} GiB"


def _job_wear(ssd_write_tb: float | None, percent: float | None, num_ssds: int) -> Iterator[tuple[str, str]]:
    if ssd_write_tb is not None:
        each = f", {_terabytes(ssd_write_tb / num_ssds)} to each of {num_ssds} SSDs" if num_ssds > 1 else ""
        least = "least rated" if num_ssds > 1 else "rated"
        rated = "" if percent is None else f", {number_text(percent, 2)}% of the {least} endurance"
        yield "the whole job writes", f"{_terabytes(ssd_write_tb)}{each}{rated}"


def _terabytes(number: float) -> str:
    return f"{number_text(number, 4)} TB" if number >= 1 else f"{number_text(number * 1000, 4)} GB"


def _choices(choices: dict[str, Any], *, is_cpu: bool) -> Iterator[tuple[str, str, str]]:
    from windlass.planner.question import choices_in_words

    in_words = choices_in_words(is_cpu=is_cpu)
    for name, value in choices.items():
        if not isinstance(value, list):
            yield in_words[name].label, _shown(value), in_words[name].meaning


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _names(operators: Any) -> str:
    return ", ".join(name.removeprefix("aten.").replace(".default", "") for name in operators) or "-"
