"""Measures host memory: its fixed part, and its growth with the model's depth: `python -m benchmarks.memory [--quick]`

All models train in the real processes under Ray, without clipping. The fixed part is the memory of a job with next to
no parameters. For the growth, two models have the same width and different depth. The growth of the peak memory of all
processes (PSS, arenas, Ray itself) is compared with the growth of the model states.
"""

import statistics
from pathlib import Path

from benchmarks.memory.fixed_memory import measure, report_on, tiny_workload
from benchmarks.peers.contenders import Contender, rounds, run_contender
from benchmarks.peers.workload import ModelShape, Workload
from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import GIB, Report, parse_options, spread
from benchmarks.scratch_folder import scratch_folder
from benchmarks.step import contenders

_STATE_NBYTES = 14  # bytes stored for a parameter: bf16 param, fp32 master and moments
MIB = 1 << 20


def workload_of(num_layers: int, *, quick: bool) -> Workload:
    """Returns a model of this depth. The width is always the same."""
    hidden = 256 if quick else 512
    shape = ModelShape(hidden=hidden, num_layers=num_layers, vocab=4096, intermediate=11 * hidden // 4, num_heads=8)
    return Workload(
        shape=shape,
        batch_size=1,
        sequence_length=128,
        num_warmup_steps=1,
        num_timed_steps=2 if quick else 4,
        num_threads=num_cores(),
        seed=1,
    )


def growth_share(peaks: dict[int, list[int]], num_params: dict[int, int]) -> float:
    """Returns the growth of the peak, divided by the growth of model states, from the shallow to the deep model."""
    shallow, deep = min(peaks), max(peaks)
    extra_nbytes = statistics.median(peaks[deep]) - statistics.median(peaks[shallow])
    return extra_nbytes / (_STATE_NBYTES * (num_params[deep] - num_params[shallow]))


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    options = parse_options("memory", __doc__, quick="narrow models, one round")
    workloads = {depth: workload_of(depth, quick=options.quick) for depth in (8, 32)}
    num_rounds = 1 if options.quick else 3
    shape = workloads[8].shape
    configuration = {
        "form": "quick" if options.quick else "full",
        "rounds": num_rounds,
        "model": f"Qwen2 shape: hidden {shape.hidden}, vocabulary {shape.vocab}, intermediate {shape.intermediate}",
        "training": f"bf16, batch 1 x {workloads[8].sequence_length}, no clipping, {workloads[8].num_threads} threads",
    }
    report = Report("Host memory", options.directory, configuration)
    peaks: dict[int, list[int]] = {depth: [] for depth in workloads}
    with scratch_folder(options.directory) as directory:
        folders = {str(depth): directory / f"{depth}-layers" for depth in workloads}
        for depth, workload in workloads.items():
            workload.write(folders[str(depth)])
        tiny = tiny_workload(100 if options.quick else 400)
        tiny_folder = directory / "tiny"
        tiny.write(tiny_folder)
        samples = measure(windlass("tiny", tiny_folder / "ssd"), tiny, tiny_folder)
        fixed_gib = report_on(report, samples)
        deep_and_shallow = [windlass(str(depth), folders[str(depth)] / "ssd") for depth in workloads]
        for contender in rounds(deep_and_shallow, num_rounds):
            depth = int(contender.name)
            run = run_contender(contender, workloads[depth], folders[contender.name])
            peaks[depth].append(run.run_peak_nbytes)
    report.add("## Growth over depth")
    report.add_table(
        ("layers", "parameters, M", "model states, GiB", "peak of the run, MiB"),
        [
            (
                str(depth),
                f"{workload.shape.num_params / 1e6:.1f}",
                f"{_STATE_NBYTES * workload.shape.num_params / GIB:.2f}",
                spread(peaks[depth], scale=MIB, digits=0),
            )
            for depth, workload in workloads.items()
        ],
    )
    report.add(
        "Spreads are median (smallest to largest). The peak is of all processes, Ray's own and the arena included."
    )
    num_params = {depth: workload.shape.num_params for depth, workload in workloads.items()}
    report.finish({"fixed_gib": fixed_gib, "depth_growth_share": growth_share(peaks, num_params)})


def windlass(name: str, ssd_dir: Path) -> Contender:
    """Returns windlass as a contender with another name."""
    ours = contenders(ssd_dir)[0]
    return Contender(
        name=name, title=ours.title, module=ours.module, arguments=ours.arguments, shm_pattern=ours.shm_pattern
    )
