"""Compares step time and memory with PyTorch, DeepSpeed and lower limits: `python -m benchmarks.step [--quick]`

Windlass runs with its states on the SSDs, in host memory (updated by its optimizers), and in device memory (updated by
the device). Without a GPU, device memory is host memory too, and a plan for such a machine puts the states there.
States in memory are written to the SSDs every tenth step. The median step is one without that.

All contenders train the same model from the same weights on the same batches with the same number of threads. They run
one after the other, for several rounds in alternating order. The first steps of every run are not timed. The limit of a
step is the larger of two times: plain PyTorch's step, and the step's SSD bytes at the mixed bandwidth measured between
the runs.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import Contender, ContenderFailedError, ContenderRun, rounds, run_contender
from benchmarks.peers.workload import ModelShape, Workload
from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import GIB, Report, parse_options, ratio, spread
from benchmarks.scratch_folder import scratch_folder
from benchmarks.ssd.mix import SETTINGS, MixFiles, mixed_bytes_per_s

# Share of reads in a step's bytes per parameter: params are read about twice and states once, both are written once.
_READ_SHARE = 16 / (16 + 14)
_NUM_SSD_DIRS = 2  # the default of windlass
_ARENAS = "windlass-benchmark-*.arena"
_ALL_BLOCKS = 10**6  # more blocks than any model has
_WINDLASS = ("ssd", "host", "plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizes of a form of the benchmark: models, rounds, and the duration of SSD measurements."""

    workloads: Mapping[str, Workload]
    num_rounds: int
    mix_s: float
    mix_file_nbytes: int


@dataclass(slots=True)
class SizeResults:
    """All measurements of one model size."""

    runs: dict[str, list[ContenderRun]] = field(default_factory=lambda: defaultdict(list))
    mix_bytes_per_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def step_s(self, name: str) -> list[float]:
        """Returns the timed steps of a contender in all rounds."""
        return [step_s for run in self.runs[name] for step_s in run.step_s]

    def median_step_s(self, name: str) -> float | None:
        """Returns the median step time, or None if the contender is missing."""
        steps = self.step_s(name)
        return statistics.median(steps) if steps else None

    def peaks(self, name: str) -> list[int]:
        """Returns the peak memory while steps run, for each round."""
        return [run.steps_peak_nbytes for run in self.runs[name] if run.missing is None]

    @property
    def best_mix_bytes_per_s(self) -> float:
        """The mixed bandwidth: the median for the setting with the largest median."""
        return max(statistics.median(values) for values in self.mix_bytes_per_s.values())

    def ssd_s(self, name: str) -> float | None:
        """Returns a step's SSD bytes divided by the mixed bandwidth, or None if the contender reports no bytes."""
        counted = [sum(run.ssd_nbytes) for run in self.runs[name] if run.ssd_nbytes is not None]
        return statistics.median(counted) / self.best_mix_bytes_per_s if counted else None


def contenders(ssd_dir: Path) -> list[Contender]:
    """Returns windlass with its states on each tier, and then its peers."""
    ssd_dirs = tuple(str(ssd_dir / f"windlass-{index}") for index in range(_NUM_SSD_DIRS))
    deepspeed = "benchmarks.peers.deepspeed_runner"

    def windlass(name: str, where: str, *options: str) -> Contender:
        return Contender(
            name=name,
            title=f"windlass, states {where}",
            module="benchmarks.peers.windlass_runner",
            arguments=(*ssd_dirs, *options),
            shm_pattern=_ARENAS,
        )

    return [
        windlass("ssd", "on SSD"),
        windlass("host", "in host memory", "--place", f"host_blocks={_ALL_BLOCKS}"),
        windlass("plan", "on the device, as planned", "--place", f"device_blocks={_ALL_BLOCKS}"),
        Contender(name="plain", title="plain PyTorch, in memory", module="benchmarks.peers.plain_runner"),
        Contender(
            name="deepspeed_cpu",
            title="DeepSpeed ZeRO-3, CPU offload",
            module=deepspeed,
            arguments=("cpu", str(ssd_dir)),
        ),
        Contender(
            name="deepspeed_nvme",
            title="DeepSpeed ZeRO-3, NVMe offload",
            module=deepspeed,
            arguments=("nvme", str(ssd_dir)),
        ),
    ]


def measure(workload: Workload, plan: Plan, directory: Path) -> SizeResults:
    """Runs all rounds of one model size. A peer may fail and is then reported as missing; windlass must not fail."""
    results = SizeResults()
    workload.write(directory / "workload")
    ssd_dir = directory / "ssd"
    ssd_dir.mkdir()
    for contender in rounds(contenders(ssd_dir), plan.num_rounds):
        if any(run.missing for run in results.runs[contender.name]):
            continue
        try:
            run = run_contender(contender, workload, directory / "workload")
        except ContenderFailedError as error:
            if contender.name in _WINDLASS:
                raise
            run = ContenderRun(missing=str(error))
        results.runs[contender.name].append(run)
        if contender.name in ("ssd", "plain"):
            measure_mix(results, plan, ssd_dir)
    return results


def measure_mix(results: SizeResults, plan: Plan, ssd_dir: Path) -> None:
    """Measures the mixed bandwidth once with every setting."""
    with MixFiles([ssd_dir / f"mix-{index}" for index in range(_NUM_SSD_DIRS)], plan.mix_file_nbytes) as files:
        for setting in SETTINGS:
            name = f"{setting.num_threads} threads, {setting.block_nbytes >> 20} MiB"
            results.mix_bytes_per_s[name].append(mixed_bytes_per_s(files, setting, _READ_SHARE, plan.mix_s))


def loss_difference(runs: Sequence[ContenderRun], reference: Sequence[ContenderRun]) -> float | None:
    """Returns the largest relative difference of losses from the reference's first run; None without a reference."""
    if not runs or not reference or reference[0].missing is not None:
        return None
    expected = reference[0].losses
    return max(abs(loss - want) / abs(want) for run in runs for loss, want in zip(run.losses, expected, strict=True))


def ratios_of(results: SizeResults, name: str) -> dict[str, float | None]:
    """Returns the ratios for one way to run windlass."""
    step_s, plain_s, ssd_s = results.median_step_s(name), results.median_step_s("plain"), results.ssd_s(name)
    limit_s = max(plain_s, ssd_s) if plain_s is not None and ssd_s is not None else None
    cores_s = step_s * num_cores() if step_s is not None else None

    def share(name_of_seconds: str) -> float | None:
        seconds = [getattr(run, name_of_seconds) for run in results.runs[name]]
        return ratio(statistics.median(seconds), cores_s) if seconds and None not in seconds else None

    nvme_peaks = results.peaks("deepspeed_nvme")
    nvme_peak = float(statistics.median(nvme_peaks)) if nvme_peaks else None
    return {
        "step_over_plain": ratio(step_s, plain_s),
        "step_over_limit": ratio(step_s, limit_s),
        "step_over_deepspeed_cpu": ratio(step_s, results.median_step_s("deepspeed_cpu")),
        "step_over_deepspeed_nvme": ratio(step_s, results.median_step_s("deepspeed_nvme")),
        "peak_over_deepspeed_nvme": ratio(statistics.median(results.peaks(name)), nvme_peak),
        "control_share": share("control_s"),
        "moving_share": share("moving_s"),
        "loss_difference": loss_difference(results.runs[name], results.runs["plain"]),
    }


def add_results(report: Report, title: str, results: SizeResults, directory: Path) -> None:
    """Adds the tables of one model size."""
    report.add("", f"## {title}")
    rows, notes = [], []
    for contender in contenders(directory):
        runs = results.runs[contender.name]
        reason = next((run.missing for run in runs if run.missing), None)
        if reason is not None:
            notes.append(f"{contender.title} is missing: {reason}")
            rows.append((contender.title, "missing", "", "", "", ""))
            continue
        moved = [run.ssd_nbytes for run in runs if run.ssd_nbytes is not None]
        read, written = (spread([each[i] for each in moved], scale=GIB) if moved else "" for i in (0, 1))
        rows.append(
            (
                contender.title,
                spread(results.step_s(contender.name)),
                spread([run.steps_peak_nbytes for run in runs], scale=GIB),
                spread([run.run_peak_nbytes for run in runs], scale=GIB),
                read,
                written,
            )
        )
    header = ("contender", "step, s", "peak in steps, GiB", "peak of the run, GiB", "SSD read, GiB", "SSD written, GiB")
    report.add_table(header, rows)
    report.add(*notes)
    mix_rows = [(name, spread(values, scale=1e9)) for name, values in results.mix_bytes_per_s.items()]
    report.add_table(("mixed O_DIRECT bandwidth", "GB/s"), mix_rows)
    ssd_s = results.ssd_s("ssd")
    if ssd_s is not None:
        report.add(
            f"A step's SSD bytes of windlass take {ssd_s:.2f} s at {results.best_mix_bytes_per_s / 1e9:.2f} GB/s."
        )


def full_plan(num_threads: int) -> Plan:
    """Returns the full form, with the two sizes whose results are quoted."""
    common: dict[str, Any] = {"sequence_length": 256, "num_threads": num_threads, "seed": 1}
    small = ModelShape(hidden=1024, num_layers=12, vocab=8192, intermediate=2816, num_heads=16)
    large = ModelShape(hidden=2048, num_layers=12, vocab=8192, intermediate=5632, num_heads=16)
    return Plan(
        workloads={
            "171M": Workload(shape=small, batch_size=4, num_warmup_steps=2, num_timed_steps=6, **common),
            "650M": Workload(shape=large, batch_size=1, num_warmup_steps=2, num_timed_steps=4, **common),
        },
        num_rounds=2,
        mix_s=1.5,
        mix_file_nbytes=1 << 30,
    )


def quick_plan(num_threads: int) -> Plan:
    """Returns the quick form. It only checks that everything runs."""
    shape = ModelShape(hidden=1024, num_layers=4, vocab=4096, intermediate=2816, num_heads=16)
    workload = Workload(
        shape=shape,
        batch_size=1,
        sequence_length=128,
        num_warmup_steps=1,
        num_timed_steps=2,
        num_threads=num_threads,
        seed=1,
    )
    return Plan(workloads={"quick": workload}, num_rounds=1, mix_s=0.3, mix_file_nbytes=1 << 28)


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    options = parse_options("step", __doc__, quick="a small model, one round", directory="on the SSD to measure")
    plan = (quick_plan if options.quick else full_plan)(num_cores())
    configuration = {
        "form": "quick" if options.quick else "full",
        "rounds": plan.num_rounds,
        "precision": "bf16 with fp32 master and moments, every layer recomputed, no clipping",
        **{name: describe(workload) for name, workload in plan.workloads.items()},
    }
    report = Report("Step time and memory", options.directory, configuration)
    ratios: dict[str, Any] = {}
    with scratch_folder(options.directory) as directory:
        for title, workload in plan.workloads.items():
            size_dir = directory / title
            results = measure(workload, plan, size_dir)
            add_results(report, title, results, size_dir)
            ratios[title] = {name: ratios_of(results, name) for name in _WINDLASS}
    report.add("", "Spreads are median (smallest to largest). Ratios are of medians. `control_share` is of all cores'")
    report.add("time in a step, without kernels, I/O, and threads that sum checksums and copy to and from the device;")
    report.add("`moving_share` is that of these threads, less the system's I/O.")
    report.finish(ratios)


def describe(workload: Workload) -> str:
    """Describes a workload in one line."""
    shape = workload.shape
    return (
        f"Qwen2 shape: hidden {shape.hidden}, {shape.num_layers} layers, vocabulary {shape.vocab}, intermediate "
        f"{shape.intermediate}, {shape.num_heads} heads, {shape.num_params / 1e6:.1f} M parameters; batch "
        f"{workload.batch_size} x {workload.sequence_length}; {workload.num_threads} threads; "
        f"{workload.num_warmup_steps} warm-up and {workload.num_timed_steps} timed steps a run"
    )


if __name__ == "__main__":
    main()
