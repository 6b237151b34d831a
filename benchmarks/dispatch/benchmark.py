"""The cost of steering: `python -m benchmarks.dispatch [--quick]`

Windlass trains a Qwen2-shaped model of many small layers as a job on Ray. The kernels of such a layer take next to no
time. So a step takes as long as Python, messages and processes need to arrange it. All model states rest in one place:
on the device, in host memory, or on the SSDs. States in memory are committed with every tenth step, states on the SSDs
with every step.

The actors are the product's own. Their clients for sockets count what they have delivered, which takes less than a
microsecond a message, and the spans of all steps are kept. The first steps of each run are left out. Plain PyTorch
trains the same model in one process, because its time shows how much of a step is torch's own Python.

A worker computes with one thread, so that its busiest thread is the one that runs kernels, and all other threads count
as control (`benchmarks/reporting/control_share.py`).
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.dispatch.message_counts import WRITES, read_counts
from benchmarks.peers.contenders import Contender, ContenderRun, rounds, run_contender
from benchmarks.peers.workload import ModelShape, Workload
from benchmarks.reporting.machine import load_of_last_minute
from benchmarks.reporting.report import Report, parse_options, spread
from benchmarks.scratch_folder import scratch_folder
from benchmarks.step import contenders, describe
from windlass.actors.job import read_journal
from windlass.actors.job.journal import METRICS
from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline import held_steps, load_step
from windlass.actors.timeline.recorder import COMPUTE

# Each mode: its name in `benchmarks.step`, and its title.
_MODES = {
    "device": ("plan", "on the device"),
    "host": ("host", "in host memory"),
    "ssd": ("ssd", "on SSD"),
}
_PLAIN = "plain"
_RUNNER = "benchmarks.dispatch.observed_runner"
_MS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The commit of one step, in seconds."""

    after_update_s: float  # from the end of the step's last update to the end of the last SSD server's commit
    store_s: float  # the longest commit of one SSD server: sync, append a record, sync


@dataclass(slots=True)
class Samples:
    """The measurements of one mode in steady state, of all rounds."""

    step_s: list[float] = field(default_factory=list)  # of each step
    compute_s: list[float] = field(default_factory=list)  # of each step: the device was busy
    control_s: list[float] = field(default_factory=list)  # of each run: processor seconds a step
    moving_s: list[float] = field(default_factory=list)  # the same, of threads that move bytes
    messages: list[Counter[str]] = field(default_factory=list)  # of each step, by kind; and writes to sockets
    commits: list[Commit] = field(default_factory=list)  # of each step that was committed

    def add(self, run: ContenderRun, files: "RunFiles", steps: Sequence[int]) -> None:
        """Take in `steps` of a run of windlass, from what it reported and the files that it left."""
        assert run.control_s is not None, "windlass reports it"
        assert run.moving_s is not None, "windlass reports it"
        self.step_s += run.step_s[: len(steps)]
        self.control_s.append(run.control_s)
        self.moving_s.append(run.moving_s)
        self.compute_s += compute_s_of(files.journal, steps)
        counts = read_counts(files.counts)
        self.messages += [counts[step] for step in steps]
        self.commits += commits_of(spans_of(files.spans), steps)

    def num_messages(self) -> list[int]:
        """The messages of each observed step."""
        return [counts.total() - counts[WRITES] for counts in self.messages]

    def mean_messages(self) -> Counter[str]:
        """The mean number of messages a step, by kind; of writes too."""
        total = sum(self.messages, Counter[str]())
        return Counter({kind: number / len(self.messages) for kind, number in total.items()})


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one mode's runs. Each run replaces those of the one before."""

    mode: str
    folder: Path

    @property
    def journal(self) -> Path:
        """The job's journal."""
        return self.folder / f"{self.mode}.jsonl"

    @property
    def counts(self) -> Path:
        """The folder with the counts of messages."""
        return self.folder / f"{self.mode}-counts"

    @property
    def spans(self) -> Path:
        """The folder with the spans of all steps."""
        return self.folder / f"{self.mode}-spans"

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the runner that make it leave them."""
        return ("--journal", str(self.journal), "--counts", str(self.counts), "--timeline", str(self.spans))


def compute_s_of(journal: Path, steps: Sequence[int]) -> list[float]:
    """The seconds in which the device was busy in each of these steps, as the job's journal has them."""
    by_step = {
        record.data["step"]: record.data["timeline"]["busy_s"].get(COMPUTE, 0.0)
        for record in read_journal(journal)
        if record.kind == METRICS and "timeline" in record.data
    }
    return [by_step[step] for step in steps if step in by_step]


def commits_of(spans: Sequence[WorkSpan], steps: Sequence[int]) -> list[Commit]:
    """The commits of those of `steps` that were committed."""
    updated_s: dict[int, float] = {}
    commits: dict[int, list[WorkSpan]] = defaultdict(list)
    for span in spans:
        if span.kind is SpanKind.UPDATE:
            updated_s[span.step] = max(span.end_s, updated_s.get(span.step, span.end_s))
        elif span.kind is SpanKind.COMMIT:
            commits[span.step].append(span)
    return [
        Commit(
            after_update_s=max(span.end_s for span in commits[step]) - updated_s[step],
            store_s=max(span.end_s - span.start_s for span in commits[step]),
        )
        for step in steps
        if step in commits and step in updated_s
    ]


def spans_of(timeline: Path) -> list[WorkSpan]:
    """The spans of all steps that a folder holds. Files of neighboring steps share spans, which come twice here."""
    steps = [load_step(timeline, step) for step in held_steps(timeline)]
    return [span for step in steps if step is not None for span in step.spans]


def figures_of(samples: Samples, num_layers: int) -> dict[str, float]:
    """The keys of one mode: medians over steps, of processor time over runs."""
    num_blocks = num_layers + 2
    return {
        "host_ms_per_layer_step": statistics.median(samples.step_s) / _MS / num_layers,
        "control_cpu_ms_per_block_step": statistics.median(samples.control_s) / _MS / num_blocks,
        "messages_per_block_step": statistics.median(samples.num_messages()) / num_blocks,
        "commit_ms": statistics.median(commit.after_update_s for commit in samples.commits) / _MS,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One form of the benchmark."""

    workload: Workload
    num_rounds: int

    @property
    def steady_steps(self) -> range:
        """The steps that count, numbered from 1. The last step is left out: the model is exported after it."""
        return range(self.workload.num_warmup_steps + 1, self.workload.num_steps)


def plan_of(*, quick: bool) -> Plan:
    """Layers whose kernels take microseconds. The timed steps hold whole periods of ten steps, one commit in each."""
    shape = ModelShape(hidden=64, num_layers=4 if quick else 32, vocab=256, intermediate=128, num_heads=2)
    workload = Workload(
        shape=shape,
        batch_size=1,
        sequence_length=16,
        num_warmup_steps=2 if quick else 10,
        num_timed_steps=10 if quick else 100,
        num_threads=1,
        seed=1,
    )
    return Plan(workload=workload, num_rounds=1 if quick else 2)


def contenders_of(folder: Path) -> list[Contender]:
    """Plain PyTorch, and windlass in each mode."""
    by_name = {contender.name: contender for contender in contenders(folder / "ssd")}
    found = [by_name[_PLAIN]]
    for mode, (name, _) in _MODES.items():
        arguments = (*by_name[name].arguments, *RunFiles(mode, folder).options)
        found.append(replace(by_name[name], name=mode, module=_RUNNER, arguments=arguments))
    return found


def measure(plan: Plan, folder: Path) -> dict[str, Samples]:
    """Run all rounds; returns the samples of each mode, and of plain PyTorch its steps. Raises where a run fails."""
    samples: dict[str, Samples] = {name: Samples() for name in (_PLAIN, *_MODES)}
    plan.workload.write(folder / "workload")
    (folder / "ssd").mkdir()
    for contender in rounds(contenders_of(folder), plan.num_rounds):
        run = run_contender(contender, plan.workload, folder / "workload")
        if run.missing is not None:
            raise RuntimeError(f"{contender.title} is missing: {run.missing}")
        if contender.name == _PLAIN:
            samples[_PLAIN].step_s += run.step_s
        else:
            samples[contender.name].add(run, RunFiles(contender.name, folder), plan.steady_steps)
    return samples


def add_tables(report: Report, samples: Mapping[str, Samples], num_layers: int) -> None:
    """Write all tables."""
    num_blocks = num_layers + 2
    of_layer, of_block = num_layers * _MS, num_blocks * _MS
    names = {mode: f"windlass, states {title}" for mode, (_, title) in _MODES.items()}
    times = [("plain PyTorch, in memory", spread(samples[_PLAIN].step_s, scale=of_layer), "", "", "")]
    steering = []
    for mode, name in names.items():
        found = samples[mode]
        step, compute = spread(found.step_s, scale=of_layer), spread(found.compute_s, scale=of_layer)
        times.append(
            (name, step, compute, spread(found.control_s, scale=of_block), spread(found.moving_s, scale=of_block))
        )
        after_update = spread([commit.after_update_s for commit in found.commits], scale=_MS, digits=1)
        store = spread([commit.store_s for commit in found.commits], scale=_MS, digits=1)
        writes = spread([counts[WRITES] for counts in found.messages], scale=num_blocks)
        messages = spread(found.num_messages(), scale=num_blocks)
        steering.append((name, messages, writes, after_update, store, str(len(found.commits))))
    header = ["time", "step, ms a layer", "compute busy, ms a layer", "control, CPU ms a block"]
    report.add_table([*header, "moving bytes, CPU ms a block"], times)
    header = ["messages and commits", "messages a block", "socket writes a block", "last update to commit, ms"]
    report.add_table([*header, "an SSD server's commit, ms", "commits"], steering)
    means = {mode: samples[mode].mean_messages() for mode in _MODES}
    kinds = sorted({kind for mean in means.values() for kind in mean} - {WRITES})
    by_kind = [(kind, *(f"{means[mode][kind] / num_blocks:.2f}" for mode in _MODES)) for kind in kinds]
    report.add_table(["messages a block and step, mean", *(title for _, title in _MODES.values())], by_kind)


def main() -> None:
    """Measure, report, end with the line of figures."""
    options = parse_options("dispatch", __doc__, quick="few layers, few steps", directory="on the SSD to use")
    plan = plan_of(quick=options.quick)
    num_layers = plan.workload.shape.num_layers
    configuration = {
        "form": "quick" if options.quick else "full",
        "rounds": plan.num_rounds,
        "model and steps": describe(plan.workload),
        "precision": "bf16 with fp32 master and moments, every layer recomputed, no clipping",
        "commits": "every step (on SSD), every 10 steps (in memory)",
        "load before": load_of_last_minute(),
    }
    report = Report("The cost of steering", options.directory, configuration)
    with scratch_folder(options.directory) as directory:
        samples = measure(plan, directory)
    add_tables(report, samples, num_layers)
    report.add(
        "Spreads are median (smallest to largest), over steps; of CPU times, over runs. A layer's share is of the "
        f"{num_layers} layers, a block's of the {num_layers + 2} blocks, and both are for one step.",
        "",
        "`control` is processor time of all processes of the job and of Ray, without kernels, I/O, and threads that "
        "sum checksums and copy to and from the device, which are `moving bytes`. `compute busy` is the time in which "
        "the device worked on an operation or an update, which is mostly torch's Python. Messages count by the step "
        "that they name: reports that a clock triggers name step 0 and are left out.",
        "",
        f"Load average of the last minute at the end: {load_of_last_minute()}.",
        "",
    )
    report.finish({mode: figures_of(samples[mode], num_layers) for mode in _MODES})


if __name__ == "__main__":
    main()
