"""Printing of a plan in words, and of what it is compared with."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from windlass.amounts import GIB, bytes_text, least_gib, number_text
from windlass.engine.memory_plan import tokens_in_words
from windlass.service.cli import print_columns
from windlass.service.validation import WindlassSettings

if TYPE_CHECKING:
    from windlass.planner.planning import Comparison
    from windlass.planner.question import PlanReport


def print_job_settings(model: str, job_settings: dict[str, Any], *, most_gpus: int, is_open: bool) -> None:
    """Prints the command for the planned job.

    `most_gpus`: that the job may get. `is_open`: the user did not choose the number of micro-batches.
    """
    defaults = WindlassSettings()
    given = {name: value for name, value in job_settings.items() if value != getattr(defaults, name)}
    if not WindlassSettings.model_validate({**given, "gradient_updates": "auto"}).leaves_order_open:
        given.pop("gradient_updates", None)  # only one order is exact, which a job gets by itself
    lanes_follow = {"lanes": "auto", "gpus": most_gpus}
    if job_settings["lanes"] == defaults.model_copy(update=given | lanes_follow).num_lanes:
        given.pop("lanes", None)
    options = " ".join(f"--set {name}={'null' if value is None else value}" for name, value in given.items())
    print(f"a job as planned: windlass submit {model} FILE {options}")
    if is_open:
        print("(a job that names no number of micro-batches gets the fastest one for the lengths of its examples)")


def print_what_if(found: "PlanReport") -> None:
    rows: list[tuple[str, ...]] = [("what if", "step, s", "tokens a second", "gain")]
    if found.step_s is not None and found.tokens_per_s is not None:
        rows.append(("as it is", number_text(found.step_s), number_text(found.tokens_per_s, 4), ""))
    else:
        rows.append(("as it is", "-", "-", "does not fit"))
    for row in found.what_if or ():
        if row.step_s is None or row.tokens_per_s is None:
            rows.append((row.change, "-", "-", "does not fit"))
        else:
            gain = "it fits" if row.gain is None else f"{row.gain:+.0%}"
            rows.append((row.change, number_text(row.step_s), number_text(row.tokens_per_s, 4), gain))
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
                f"{bytes_text(int(gib * GIB))} of {memory} memory" for memory, gib in each.missing_gib.items()
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


def print_report(found: "PlanReport") -> None:
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
            ("step", f"{step} s; no resource alone takes more than {bound} s"),
            ("how sure", _interval(found)),
            ("tokens a second", number_text(numbers["tokens_per_s"], 4)),
            ("model's TFLOPS", number_text(numbers["tflops"], 4)),
            ("written to SSDs a step", f"{number_text(numbers['ssd_write_gb_per_step'], 4)} GB"),
            *((f"peak of {name} memory", f"{gib:.2f} GiB") for name, gib in numbers["peak_gib"].items()),
            *((f"{name} busy", f"{number_text(seconds)} s") for name, seconds in numbers["busy_s"].items()),
        ]
    )
    print()
    activations = numbers["choices"]["activations"]
    print_columns([(name, _shown(each)) for name, each in numbers["choices"].items() if not isinstance(each, list)])
    print()
    rows = [("layers", "input", "rest", "kept", "swapped")]
    rows += [
        (each["layers"], each["input"], each["rest"], *(_names(each.get(key, ())) for key in ("kept", "swapped")))
        for each in activations
    ]
    print_columns(rows)
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


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _names(operators: Any) -> str:
    return ", ".join(name.removeprefix("aten.").replace(".default", "") for name in operators) or "-"
