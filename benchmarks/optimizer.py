"""The optimizer's kernel beside its peers and memcpy: `python -m benchmarks.optimizer [--quick]`

AdamW on one chunk in shared memory, states in fp32, split and in bf16, gradients in bf16, fp16 and fp32; a param in
bf16 is written too. The peers know fp32 states only, so a kernel on split states is compared with them by parameters a
second. All contenders of a gradient's format take turns in rounds, in alternating order, with the same threads and in
the same memory, and so do copies of bytes. Bytes are those that must move, each once; what is cast in passing is not
counted. Other work on the machine shows at once: its cores must be idle.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.machine import num_cores
from benchmarks.optimizer_contenders import (
    Contender,
    ContenderMissing,
    Memory,
    copies,
    deepspeed,
    memory_of,
    torch_fused,
    windlass,
)
from benchmarks.report import Report, ratio, spread
from windlass.storage.ids import StatePrecision

_GRAD_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DEEPSPEED, _MEMCPY = "DeepSpeed CPUAdam and casts", "memcpy"

Times = Mapping[str, Sequence[float]]  # seconds a call, by contender


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One form of the benchmark."""

    numel: int
    num_rounds: int
    num_calls: int  # timed, of each contender in each round
    grads: Sequence[str]


FULL = Plan(numel=32 << 20, num_rounds=6, num_calls=5, grads=tuple(_GRAD_DTYPES))
QUICK = Plan(numel=16 << 20, num_rounds=2, num_calls=3, grads=("bf16",))


def measure(contenders: Sequence[Contender], plan: Plan) -> dict[str, list[float]]:
    """Seconds of every timed call, by contender; one call before them warms up."""
    times: dict[str, list[float]] = defaultdict(list)
    for index in range(plan.num_rounds):
        for contender in contenders if index % 2 == 0 else reversed(contenders):
            contender.prepare()
            contender.run()
            for _ in range(plan.num_calls):
                start_s = time.perf_counter()
                contender.run()
                times[contender.name].append(time.perf_counter() - start_s)
    return times


def contenders_of(memory: Memory, grad: str, cache_dir: Path) -> tuple[list[Contender], str | None]:
    """All that run here, and why DeepSpeed does not, if so."""
    dtype = _GRAD_DTYPES[grad]
    found = []
    for states in StatePrecision:
        ours = windlass(memory, states, dtype, cache_dir)
        found.append(Contender(name=name_of(states), nbytes=ours.nbytes, prepare=ours.prepare, run=ours.run))
    found.append(torch_fused(memory, dtype))
    missing = None
    try:
        found.append(deepspeed(memory, dtype))
    except ContenderMissing as error:
        missing = str(error)
    return [*found, *copies(memory)], missing


def name_of(states: StatePrecision) -> str:
    """How the reports call windlass on these states."""
    return f"windlass, {states} states"


def rows_of(grad: str, contenders: Sequence[Contender], times: Times, numel: int) -> list[tuple[str, ...]]:
    """The table's rows of one gradient format."""
    rows: list[tuple[str, ...]] = []
    for contender in contenders:
        seconds = times[contender.name]
        is_copy = contender.name.startswith(_MEMCPY)
        rate = "" if is_copy else spread([numel / value for value in seconds], scale=1e9)
        bandwidth = spread([contender.nbytes / value for value in seconds], scale=1e9, digits=1)
        rows.append((grad, contender.name, rate, bandwidth))
    return rows


def ratios_of(results: Mapping[str, tuple[Sequence[Contender], Times]]) -> dict[str, float | None]:
    """The keys of the last line; the least over the gradients' formats."""
    lossless = [name_of(states) for states in (StatePrecision.FP32, StatePrecision.SPLIT)]
    over_deepspeed: list[float | None] = []
    over_memcpy: list[float | None] = []
    bf16_over_memcpy: list[float | None] = []
    for contenders, times in results.values():
        seconds = {name: statistics.median(values) for name, values in times.items()}
        bandwidth = {contender.name: contender.nbytes / seconds[contender.name] for contender in contenders}
        copied = max(value for name, value in bandwidth.items() if name.startswith(_MEMCPY))
        over_deepspeed += [ratio(seconds.get(_DEEPSPEED), seconds[name]) for name in lossless]
        over_memcpy += [ratio(bandwidth[name], copied) for name in lossless]
        bf16_over_memcpy.append(ratio(bandwidth[name_of(StatePrecision.BF16)], copied))
    return {
        "over_deepspeed_min": _least(over_deepspeed),
        "over_memcpy_min": _least(over_memcpy),
        "bf16_over_memcpy": _least(bf16_over_memcpy),
    }


def _least(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return min(present) if len(present) == len(values) else None


def main() -> None:
    """Measure, report, end with the line of ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="gradients in bf16 only, two rounds")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    num_threads = num_cores()
    torch.set_num_threads(num_threads)
    configuration = {
        "form": "quick" if options.quick else "full",
        "chunk": f"{plan.numel / 2**20:.0f} Mi elements, the first half with weight decay",
        "rounds": f"{plan.num_rounds} of {plan.num_calls} calls each",
        "threads": num_threads,
    }
    report = Report("AdamW on one chunk", Path(), configuration)
    results: dict[str, tuple[Sequence[Contender], Times]] = {}
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as directory, memory_of(plan.numel) as memory:
        for grad in plan.grads:
            contenders, missing = contenders_of(memory, grad, Path(directory))
            times = measure(contenders, plan)
            results[grad] = contenders, times
            rows += rows_of(grad, contenders, times, plan.numel)
            notes += [f"DeepSpeed's CPUAdam is missing: {missing}"] if missing and not notes else []
    report.add_table(("gradient", "contender", "parameters, 10^9/s", "GB/s"), rows)
    report.add(*notes, "Spreads are median (smallest to largest) over all calls.")
    report.finish({**ratios_of(results), "actor_over_bare": None})


if __name__ == "__main__":
    main()
