"""Compares the optimizer's kernel with its peers and memcpy: `python -m benchmarks.optimizer [--quick]`

It measures AdamW on one chunk in shared memory. States are fp32, split or bf16; gradients are bf16, fp16 or fp32. A
bf16 param is written too. The peers support fp32 states only, so split states are compared by parameters per second.

All contenders for a gradient format, and plain copies, run in rounds in alternating order, with the same threads and
memory. Bytes are the minimum that must move; intermediate casts are not counted. The machine must be idle, because
other work changes the result at once.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.optimizer.actor import actor_and_bare
from benchmarks.optimizer.contenders import (
    Contender,
    ContenderMissing,
    Memory,
    copies,
    deepspeed,
    memory_of,
    torch_fused,
    windlass,
)
from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import Report, spread
from benchmarks.scratch_folder import scratch_folder
from windlass.storage.ids import StatePrecision

_GRAD_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DEEPSPEED, _MEMCPY = "DeepSpeed CPUAdam and casts", "memcpy"

Times = Mapping[str, Sequence[float]]  # seconds per call, by contender


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizes of one form of the benchmark."""

    numel: int
    num_rounds: int
    num_calls: int  # timed calls of each contender in each round
    grads: Sequence[str]


FULL = Plan(numel=32 << 20, num_rounds=11, num_calls=3, grads=tuple(_GRAD_DTYPES))
QUICK = Plan(numel=16 << 20, num_rounds=3, num_calls=3, grads=("bf16",))


def measure(contenders: Sequence[Contender], plan: Plan) -> dict[str, list[float]]:
    """Returns the seconds per call by contender: the median of each round, after a warm-up call."""
    times: dict[str, list[float]] = defaultdict(list)
    for index in range(plan.num_rounds):
        for contender in contenders if index % 2 == 0 else reversed(contenders):
            contender.prepare()
            contender.run()
            calls = []
            for _ in range(plan.num_calls):
                start_s = time.perf_counter()
                contender.run()
                calls.append(time.perf_counter() - start_s)
            times[contender.name].append(statistics.median(calls))
    return times


def contenders_of(memory: Memory, grad: str, cache_dir: Path) -> tuple[list[Contender], str | None]:
    """Returns all contenders that run on this machine, and why DeepSpeed does not, if so."""
    dtype = _GRAD_DTYPES[grad]
    contenders = []
    for states in StatePrecision:
        ours = windlass(memory, states, dtype, cache_dir)
        contenders.append(Contender(name=name_of(states), nbytes=ours.nbytes, prepare=ours.prepare, run=ours.run))
    contenders.append(torch_fused(memory, dtype))
    missing = None
    try:
        contenders.append(deepspeed(memory, dtype))
    except ContenderMissing as error:
        missing = str(error)
    return [*contenders, *copies(memory)], missing


def name_of(states: StatePrecision) -> str:
    """Returns the name of windlass with these states in reports."""
    return f"windlass, {states} states"


def rows_of(grad: str, contenders: Sequence[Contender], times: Times, numel: int) -> list[tuple[str, ...]]:
    """Returns the table rows of one gradient format."""
    rows: list[tuple[str, ...]] = []
    for contender in contenders:
        seconds = times[contender.name]
        is_copy = contender.name.startswith(_MEMCPY)
        rate = "" if is_copy else spread([numel / value for value in seconds], scale=1e9)
        bandwidth = spread([contender.nbytes / value for value in seconds], scale=1e9, digits=1)
        rows.append((grad, contender.name, rate, bandwidth))
    return rows


def ratios_of(results: Mapping[str, tuple[Sequence[Contender], Times]]) -> dict[str, float | None]:
    """Returns the ratios of the last line. Each is a median over rounds, because a machine's speed changes between
    them.

    They are the minimum over the gradient formats, and over fp32 and split states.
    """
    lossless = [name_of(states) for states in (StatePrecision.FP32, StatePrecision.SPLIT)]
    over_deepspeed: list[float | None] = []
    over_memcpy: list[float] = []
    bf16_over_memcpy: list[float] = []
    for contenders, times in results.values():
        nbytes = {contender.name: contender.nbytes for contender in contenders}
        rates = {name: [nbytes[name] / seconds for seconds in values] for name, values in times.items()}
        copies_of_rounds = zip(*(values for name, values in rates.items() if name.startswith(_MEMCPY)), strict=True)
        copied = [max(values) for values in copies_of_rounds]
        over_deepspeed += [
            _median_ratio(times[_DEEPSPEED], times[name]) if _DEEPSPEED in times else None for name in lossless
        ]
        over_memcpy += [_median_ratio(rates[name], copied) for name in lossless]
        bf16_over_memcpy.append(_median_ratio(rates[name_of(StatePrecision.BF16)], copied))
    present = [value for value in over_deepspeed if value is not None]
    return {
        "over_deepspeed_min": min(present) if len(present) == len(over_deepspeed) else None,
        "over_memcpy_min": min(over_memcpy),
        "bf16_over_memcpy": min(bf16_over_memcpy),
    }


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(over, under, strict=True))


def actor_over_bare(report: Report, folder: Path, plan: Plan, num_threads: int) -> float:
    """Returns the minimum ratio of the actor's rate to the bare kernel's, over all state formats."""
    rows, shares = [], []
    for states in StatePrecision:
        seconds: dict[str, list[float]] = defaultdict(list)
        with actor_and_bare(folder, states, num_threads) as (actor, bare):
            for turn in range(plan.num_rounds * plan.num_calls):
                contenders = [("bare", bare.run), ("actor", actor.run)]
                for name, run in contenders if turn % 2 == 0 else reversed(contenders):
                    seconds[name].append(run())
        shares.append(statistics.median(seconds["bare"]) / statistics.median(seconds["actor"]))
        spreads = [spread(seconds[name], scale=1e-3, digits=1) for name in ("bare", "actor")]
        rows.append((str(states), *spreads, f"{shares[-1]:.2f}"))
    report.add(
        "", "The actor, with SSD servers that answer at once, and the bare kernel on the same slots, bf16 gradients:"
    )
    report.add_table(("states", "bare kernel, ms a block", "actor, ms a block", "actor over bare"), rows)
    return min(shares)


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="gradients in bf16 only, three rounds")
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
    with scratch_folder() as directory, memory_of(plan.numel) as memory:
        for grad in plan.grads:
            contenders, missing = contenders_of(memory, grad, directory)
            times = measure(contenders, plan)
            results[grad] = contenders, times
            rows += rows_of(grad, contenders, times, plan.numel)
            notes += [f"DeepSpeed's CPUAdam is missing: {missing}"] if missing and not notes else []
    report.add_table(("gradient", "contender", "parameters, 10^9/s", "GB/s"), rows)
    report.add(
        *notes, "Spreads are median (smallest to largest) over the rounds; ratios are medians of those within a round."
    )
    with scratch_folder() as directory:
        share = actor_over_bare(report, directory, plan, num_threads)
    report.finish({**ratios_of(results), "actor_over_bare": share})


if __name__ == "__main__":
    main()
