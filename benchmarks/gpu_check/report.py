"""Makes the check's tables, and the object of its last line, from the lines of its results file. Loads no torch."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.case import Case, Result, Status
from benchmarks.gpu_check.cases import CAP_NBYTES, PeerCase, SpeedCase, States
from benchmarks.peers.schedules import System
from benchmarks.reporting.machine import describe_machine
from benchmarks.reporting.report import GIB, ratio, spread, table
from windlass.storage.ids import Precision

_AIM_FROM_BATCH = 16
_PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16)


def report_lines(results: Mapping[str, Result], cases: Sequence[Case], directory: Path, form: str) -> list[str]:
    """Returns the report as Markdown, without the last line."""
    lines = ["# GPU check", "", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {form}", ""]
    lines += [*table(("machine", ""), describe_machine(directory)), ""]
    makers: dict[str, Callable[[list[Result]], list[str]]] = {
        "link": _link_tables,
        "parity": _parity_tables,
        "speed": _speed_tables,
        "peers": _peer_tables,
    }
    ordered = [results[case.name] for case in cases if case.name in results]
    for part, make in makers.items():
        if done := [result for result in ordered if result.part == part and result.status is Status.DONE]:
            lines += [f"## {part.capitalize()}", "", *make(done), ""]
    missing = [(each.case, str(each.status), each.reason) for each in ordered if each.status is not Status.DONE]
    return [*lines, *([*table(("case", "", "reason"), missing), ""] if missing else [])]


def has_failed(results: Mapping[str, Result]) -> bool:
    """Checks whether a case failed, or windlass's results differ from plain PyTorch's."""
    return any(each.status is Status.FAILED or each.measured.get("num_wrong") for each in results.values())


def in_words(result: Result) -> str:
    """Describes the end of a case in one line."""
    found = result.measured
    if result.status is not Status.DONE:
        return f"{result.status}: {result.reason}"
    match result.part:
        case "link":
            rates = ", ".join(f"{way} {found[f'{way}_gb_per_s']:.1f}" for way in ("h2d", "d2h", "duplex"))
            return f"GB/s: {rates}{_together(found.get('by_device'))}; a launch {found['launch_us']:.1f} us"
        case "parity":
            return f"{found['num_wrong']} of {len(found['runs'])} variants are wrong"
        case "speed":
            error, waits = found["step_error"], found["host_waits"]
            step = f"{spread(found['step_s'])} s a step, {_number(found['step_over_compute_only'])} x compute only"
            predicted = "" if error is None else f", predicted {result.predicted['step_s']:.2f} s"
            return f"{step}{predicted}{'' if waits is None else f', {waits} waits of the host'}"
        case _:
            return f"{found['tokens_per_s']:.0f} tokens/s"


def _together(found: Mapping[str, Any] | None) -> str:
    if found is None or "reason" in found:
        return ""
    return f"; {len(found['devices'])} devices at once {found['together']['duplex_gb_per_s']:.1f}"


# --- the last line ----------------------------------------------------------------------------------------------------


def keys(results: Mapping[str, Result], cases: Sequence[Case]) -> dict[str, Any]:
    """Returns the figures of the last line; null where nothing was measured."""
    speeds = [case for case in cases if isinstance(case, SpeedCase)]
    found = {case.name: results[case.name].measured for case in speeds if case.name in results}
    aimed_at = [case for case in speeds if case.batch_size >= _AIM_FROM_BATCH and case.schedule is None]

    def worst(key: str, chosen: Iterable[SpeedCase] = speeds) -> Any:
        values = (found.get(case.name, {}).get(key) for case in chosen)
        return max((value for value in values if value is not None), default=None)

    def each(value: Callable[[Mapping[str, Any]], float | None]) -> dict[str, float | None]:
        return {case.name: value(found[case.name]) if found.get(case.name) else None for case in speeds}

    shares = {
        states: min(
            (
                share
                for case in aimed_at
                if case.states is states and (share := _share(found.get(case.name, {}), "recompute")) is not None
            ),
            default=None,
        )
        for states in States
    }
    return {
        "step_over_compute_only": worst("step_over_compute_only", aimed_at),
        "step_over_plain": worst("step_over_plain"),
        "reserved_over_planned": worst("reserved_over_planned"),
        "host_waits": worst("host_waits"),
        "step_error_max": worst("step_error"),
        **_parity_keys(results),
        "share_of_peak_min_from_batch_16": shares,
        "tokens_per_s": each(lambda run: run["tokens_per_s"]),
        "share_of_peak": each(lambda run: _share(run, "recompute")),
        "share_of_peak_without_recompute": each(lambda run: _share(run, "keep")),
        "overlap_efficiency": each(lambda run: run["overlap_efficiency"]),
        "gpu_peak_gib": each(lambda run: ratio(run["gpu_peak_nbytes"], GIB)),
        "host_peak_gib": each(lambda run: run["host_peak_nbytes"] / GIB),
        **_peer_keys(results, cases),
    }


def _share(run: Mapping[str, Any], choice: str) -> float | None:
    """Returns a run's speed as a share of the compute-only speed."""
    if not run or run["compute_only_s"][choice] is None:
        return None
    return float(run["compute_only_s"][choice] / _median(run["step_s"]))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _parity_keys(results: Mapping[str, Result]) -> dict[str, Any]:
    found = {name: each.measured for name, each in results.items() if each.part == "parity" and each.measured}

    def of(key: str) -> dict[str, float | None]:
        """Returns the largest of each precision's cases."""
        values: dict[str, float | None] = dict.fromkeys(map(str, _PRECISIONS))
        for name, measured in found.items():
            precision, value = _precision_of(name), measured.get(key)
            if value is not None:
                values[precision] = max(value, values[precision] or 0.0)
        return values

    return {
        "loss_difference_max": of("loss_difference_max"),
        "param_difference_max": of("param_difference_max"),
        "num_wrong": sum(each.get("num_wrong", 0) for each in found.values()),
    }


def _precision_of(name: str) -> str:
    """Returns the precision in the name of a parity case."""
    return name.split("-")[1]


def _peer_keys(results: Mapping[str, Result], cases: Sequence[Case]) -> dict[str, Any]:
    """Returns windlass's speed over each peer's, and over that of its own imitation."""

    def speed(name: str | None) -> float | None:
        return None if name is None or name not in results else results[name].measured.get("tokens_per_s")

    def name_of(states: States, system: System | None) -> str | None:
        chosen = (case for case in cases if isinstance(case, SpeedCase) and case.has_cap)
        wanted = ("1.5B", states, 16, system)
        return next((each.name for each in chosen if _kind(each) == wanted), None)

    ratios: dict[str, Any] = {}
    for peer in (case for case in cases if isinstance(case, PeerCase)):
        ours = speed(name_of(peer.states, None))
        ratios[f"over_deepspeed_{peer.schedule}"] = ratio(ours, speed(peer.name))
        ratios[f"over_{peer.schedule}_schedule"] = ratio(ours, speed(name_of(peer.states, peer.schedule)))
    return ratios


def _kind(case: SpeedCase) -> tuple[str, States, int, System | None]:
    return case.model, case.states, case.batch_size, case.schedule


# --- tables -----------------------------------------------------------------------------------------------------------


def _link_tables(results: list[Result]) -> list[str]:
    import yaml

    (found,) = (each.measured for each in results)
    rows = [(key.replace("_", " "), f"{value:.3g}") for key, value in found.items() if isinstance(value, float)]
    profile = yaml.safe_dump(found["hardware"], sort_keys=False).splitlines()
    return [
        *table(("from a registered arena", ""), rows),
        *_link_table_by_device(found.get("by_device")),
        "",
        "The machine's profile, for `windlass plan`:",
        "",
        *(f"    {line}" for line in profile),
        *(_head_lines(found["head"]) if "head" in found else []),
    ]


def _link_table_by_device(found: Mapping[str, Any] | None) -> list[str]:
    """Returns the table of a machine with several GPUs, with a row of sums at its end; or why it is missing."""
    if found is None:
        return []
    if "reason" in found:
        return ["", f"The links of all GPUs were not measured: {found['reason']}"]
    ways = ("h2d", "d2h", "duplex")
    rows = [
        (each["device"], *(_number(each[when][f"{way}_gb_per_s"]) for when in ("alone", "at_once") for way in ways))
        for each in found["devices"]
    ]
    sums = [sum(each["alone"][f"{way}_gb_per_s"] for each in found["devices"]) for way in ways]
    together = [found["together"][f"{way}_gb_per_s"] for way in ways]
    columns = ("GB/s", *(f"{way}, {when}" for when in ("alone", "all at once") for way in ways))
    return ["", *table(columns, [*rows, ("all", *map(_number, (*sums, *together)))])]


def _kernels(names: Sequence[str]) -> str:
    return ", ".join(names) or "torch's"


def _head_lines(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for run in found["runs"]:
        if run["reason"]:
            rows.append((_kernels(run["kernels"]), "", "", run["reason"]))
            continue
        peak = "" if run["peak_nbytes"] is None else f"{run['peak_nbytes'] / GIB:.2f}"
        times = spread(run["head_s"], scale=1e-3)
        difference = "" if run["grad_difference"] is None else f"{run['grad_difference']:.1e}"
        rows.append((_kernels(run["kernels"]), times, peak, difference))
    shape = f"{found['num_tokens']} tokens, vocabulary {found['vocab']}, hidden size {found['hidden']}, bf16"
    return ["", f"The head alone, {shape}:", "", *table(("kernels", "ms", "GiB", "gradient differs by"), rows)]


def _parity_tables(results: list[Result]) -> list[str]:
    settings = ("activations", "place", "num_microbatches", "is_tied", "num_ahead")
    floors, rows = [], []
    for result in results:
        precision = _precision_of(result.case)
        repeated, floor = result.measured["repeated"], result.measured["floor"]
        floors.append((precision, *(f"{each[key]:.1e}" for each in (repeated, floor) for key in ("loss", "params"))))
        for run in result.measured["runs"]:
            difference = run["difference"]
            found = ("", "") if difference is None else (f"{difference['loss']:.1e}", f"{difference['params']:.1e}")
            cells = {key: str(run[key]) for key in settings}
            cells["activations"] += ", to SSD" if run["swaps_to_ssd"] else ""
            cells["place"] += ", in pieces" if run["is_streamed"] else ""
            cells["activations"] += ", head in slices" if run.get("is_sliced") else ""
            cells["place"] += ", cut matrices" if run.get("cut_matrices") else ""
            cells["place"] += ", clipped" if run.get("clip_norm") else ""
            several = (("lanes", "lanes"), ("num_ranks", "workers a box"), ("num_boxes", "boxes"))
            cells["num_microbatches"] += "".join(f", {run[key]} {word}" for key, word in several if run.get(key, 1) > 1)
            kernels = _kernels(run.get("model_kernels", ()))
            waits = "" if difference is None else str(run["host_waits"])
            updates = str(run["kernel"] or "compiled")
            rows.append((precision, *cells.values(), updates, kernels, waits, *found, _verdict(run)))
    names = ("activations", "states on", "micro-batches", "tied", "operations at once", "updates", "kernels")
    columns = ("precision", *names, "waits", "loss differs by", "params", "")
    floor_columns = ("precision", "plain twice: loss", "params", "noise floor: loss", "params")
    return [*table(floor_columns, floors), "", *table(columns, rows)]


def _verdict(run: Mapping[str, Any]) -> str:
    if run["difference"] is None:
        return f"{'FAILED' if run['is_wrong'] else 'not tried'}: {run['reason']}"
    return "WAITS" if run["host_waits"] else "DIFFERS" if run["is_wrong"] else "equal"


def _explanation() -> list[str]:
    return textwrap.wrap(
        "bf16, AdamW, no clipping; fp32 states, or split ones that are equal. The cap is "
        f"{CAP_NBYTES / GIB:g} GiB, on torch's caching allocator; CUDA's context comes on top. States on host: the job "
        "has no SSDs and keeps no checkpoints. Compute only: two distinct layers, the embedding and the head, params "
        "and gradients on the GPU, through the same block runner; a layer's time counts as often as the model has "
        "layers. All sides compute with torch's own kernels. The prediction was written down before the case was "
        "measured.",
        width=110,
    )


def _speed_tables(results: list[Result]) -> list[str]:
    steps, memory, times, waits = [], [], [], []
    for result in results:
        found, predicted = result.measured, result.predicted
        steps.append(
            (
                result.case,
                found["model"],
                found["activations"],
                spread(found["step_s"]),
                _number(predicted.get("step_s")),
                _number(found["step_over_compute_only"]),
                _number(found["plain_step_s"]) or found["plain_note"],
                _number(found["step_over_plain"]),
                f"{found['tokens_per_s']:.0f}",
                _number(found["overlap_efficiency"]),
                found["kernel"],
            )
        )
        memory.append(
            (
                result.case,
                _number(predicted.get("gpu_gib")),
                _gib(found["gpu_reserved_nbytes"]),
                _number(found["reserved_over_planned"]),
                _gib(found["gpu_peak_nbytes"]),
                "" if found["num_alloc_retries"] is None else str(found["num_alloc_retries"]),
                _gib(found["arena_nbytes"]),
                _gib(found["host_peak_nbytes"]),
                _gib(found["swapped_nbytes"]),
            )
        )
        times.append((result.case, _seconds(found["busy_s"]), _seconds(found["stall_s"])))
        waits += [(result.case, line, str(number)) for line, number in found["host_waits_by_line"].items()]
    traced = [result for result in results if result.measured["trace"]]
    worst = max(traced, key=lambda result: float(result.measured["step_over_compute_only"]), default=None)
    return [
        *_explanation(),
        "",
        *table(_STEP_COLUMNS, steps),
        "",
        *table(_MEMORY_COLUMNS, memory),
        "",
        *table(("case", "busy, s a step", "nothing computed, s a step, by cause"), times),
        *(["", *table(("the host waited in", "line", "times a step"), waits)] if waits else []),
        *([] if worst is None else ["", f"The trace of the worst case, {worst.case}: {worst.measured['trace']}"]),
    ]


_STEP_COLUMNS = (
    "case",
    "model",
    "activations",
    "step, s",
    "predicted, s",
    "over compute only",
    "plain PyTorch, s",
    "over plain",
    "tokens/s",
    "overlap efficiency",
    "updates",
)
_MEMORY_COLUMNS = (
    "GiB",
    "GPU, planned",
    "reserved",
    "reserved over planned",
    "allocated",
    "allocator retries",
    "arena",
    "host peak",
    "swapped a step",
)


def _peer_tables(results: list[Result]) -> list[str]:
    rows = [
        (
            each.case,
            spread(each.measured["step_s"]),
            f"{each.measured['tokens_per_s']:.0f}",
            _gib(each.measured["run_peak_nbytes"]),
        )
        for each in results
    ]
    return table(("1.5B, batch 16 in 4 micro-batches", "step, s", "tokens/s", "host peak (PSS), GiB"), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.2f}"


def _seconds(by_name: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in by_name.items() if seconds >= 0.005)
