"""Runs windlass as a contender: a job on Ray.

`python -m benchmarks.peers.windlass_runner FOLDER SSD_DIR... [--change NAME=VALUE]`

This process has the dispatcher's role: it starts the Ray daemon and the job's runner, and reads the journal. It imports
Ray only after its environment is set, because Ray reads the environment on import.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import emit
from benchmarks.peers.schedules import System, behaving_as
from benchmarks.peers.workload import DATASET_DIR, MODEL_DIR, Workload, read_workload
from benchmarks.reporting.control_share import overhead, role_of
from benchmarks.reporting.pss import process_tree, thread_seconds
from benchmarks.scheduler.throttle import Throttle
from windlass.actors.job import JOURNAL_FILE, OUTCOME, JobSpec, JournalReader, JournalRecord
from windlass.actors.job.journal import METRICS
from windlass.actors.timeline import FOLDER as SPANS_FOLDER
from windlass.actors.worker_policy import Ordering, QueueOrder
from windlass.engine.memory_plan import ActivationChoice, Placement, UpdateOrder
from windlass.engine.training_config import Schedule, TrainingConfig
from windlass.service.jobs import ARENA_DIR, MachineResources
from windlass.service.machine import RayCluster
from windlass.storage.ids import JobId, StatePrecision
from windlass.storage.memory import remove_leftovers

_POLL_S = 0.05  # interval between reads of the journal
_DEADLINE_S = 300.0  # timeout of the job's actors, and of the runner's end
# Text of the journal's record between loading the model and the first step.
_TRAINING_BEGINS = "training begins"


class WindlassFailedError(Exception):
    """Raised if the job did not end with a model."""


def main() -> None:
    """Trains the workload as a job, reports its steps, and ends all processes that it started."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.windlass_runner", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("ssd_dirs", type=Path, nargs="+")
    parser.add_argument("--change", action="append", default=[], metavar="NAME=VALUE", help="of a hyperparameter")
    parser.add_argument("--place", action="append", default=[], metavar="NAME=VALUE", help="of the placement")
    parser.add_argument("--order", action="append", default=[], metavar="NAME=VALUE", help="of the ordering")
    parser.add_argument("--throttle", action="append", default=[], metavar="NAME=VALUE", help="rates of resources")
    parser.add_argument("--behave-as", type=System, choices=list(System), help="another system, for comparison")
    parser.add_argument("--journal", type=Path, help="where a copy of the job's journal is to be kept")
    parser.add_argument("--timeline", type=Path, help="where a copy of the spans of its last steps is to be kept")
    options = parser.parse_args()
    workload = read_workload(options.folder)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="home-") as home:
        spec = job_spec(workload, options.folder, Path(home), options.ssd_dirs)
        num_blocks = workload.shape.num_layers + 2
        spec = replace(
            spec,
            training=changed(spec.training, options.change),
            placement=placement_of(options.place, num_blocks),
            ordering=ordering_of(options.order),
        )
        if options.behave_as is not None:
            spec = behaving_as(spec, options.behave_as, num_blocks)
        spec = with_room(spec)
        throttle_of(options.throttle).write(Path(home))
        try:
            run(workload, spec, Path(home), options.ssd_dirs, is_throttled=bool(options.throttle))
        finally:
            journal = Path(home) / JOURNAL_FILE
            if options.journal is not None and journal.exists():
                shutil.copy(journal, options.journal)
            if options.timeline is not None and (Path(home) / SPANS_FOLDER).exists():
                shutil.rmtree(options.timeline, ignore_errors=True)  # a copy of an earlier round
                shutil.copytree(Path(home) / SPANS_FOLDER, options.timeline)


def changed(training: TrainingConfig, changes: Sequence[str]) -> TrainingConfig:
    """Returns the training config with some `NAME=VALUE` changes."""
    kinds: dict[str, Callable[[str], Any]] = {"clip_norm": float, "num_microbatches": int}
    kinds |= {"state_precision": StatePrecision, "update_order": UpdateOrder}
    pairs = [change.split("=", 1) for change in changes]
    return replace(training, **{name: kinds[name](value) for name, value in pairs})


def placement_of(choices: Sequence[str], num_blocks: int) -> Placement:
    """Returns the placement of `NAME=VALUE` choices.

    `host_blocks` and `device_blocks` are numbers of blocks, from the first. `activations` is the name of a choice.
    """
    words = dict(choice.split("=", 1) for choice in choices)
    activations = ActivationChoice(words.pop("activations", ActivationChoice.RECOMPUTE)).of_layers(num_blocks - 2)
    values: dict[str, Any] = {name: int(value) for name, value in words.items()}
    blocks = {name: tuple(range(min(values.pop(name, 0), num_blocks))) for name in ("host_blocks", "device_blocks")}
    return Placement(
        host_blocks=blocks["host_blocks"], device_blocks=blocks["device_blocks"], activations=activations, **values
    )


def with_room(spec: JobSpec) -> JobSpec:
    """Adds host memory for swapped activations, if the placement swaps and sets no memory for it."""
    placement = spec.placement
    has_room = placement.host_activation_nbytes or placement.ssd_activation_nbytes
    if has_room or not any(choice.swaps for choice in placement.activations):
        return spec
    from benchmarks.activations.memory_need import room_for_activations

    nbytes = room_for_activations(spec, placement)
    return replace(spec, placement=replace(placement, host_activation_nbytes=nbytes))


def ordering_of(choices: Sequence[str]) -> Ordering:
    """Returns the ordering of `NAME=VALUE` choices; `overlaps_steps` is 0 or 1."""
    kinds: dict[str, Callable[[str], Any]] = {
        "queues": QueueOrder,
        "overlaps_steps": lambda value: bool(int(value)),
    }
    pairs = [choice.split("=", 1) for choice in choices]
    return Ordering(**{name: kinds.get(name, int)(value) for name, value in pairs})


def throttle_of(choices: Sequence[str]) -> Throttle:
    """Returns the throttle of `NAME=VALUE` choices."""
    rates: dict[str, Any] = {name: float(value) for name, value in (choice.split("=", 1) for choice in choices)}
    return Throttle(**rates)


def run(workload: Workload, spec: JobSpec, home: Path, ssd_dirs: Sequence[Path], *, is_throttled: bool) -> None:
    """Runs one job with its own Ray daemon."""
    check_model(spec, home)
    cluster = RayCluster(home)
    _end_on_sigterm()
    try:
        cluster.ensure_running(num_cpus=workload.num_threads, num_gpus=0)
        cluster.connect()
        _end_on_sigterm()  # again, because Ray has set its own handlers
        emit("processes", pids=cluster.pids)
        train(workload, spec, ssd_dirs, cluster.pids, is_throttled=is_throttled)
    finally:
        cluster.stop()
        remove_leftovers(ARENA_DIR)


def train(
    workload: Workload,
    spec: JobSpec,
    ssd_dirs: Sequence[Path],
    ray_pids: Sequence[int],
    *,
    is_throttled: bool,
) -> None:
    """Runs the job on the connected Ray until its processes have ended, and disconnects."""
    import ray

    from windlass.actors.runtime.ray_runner import find_runner, start_runner

    try:
        if is_throttled:
            from benchmarks.scheduler.throttled_actors import throttle_runners

            throttle_runners()
        start_runner(spec)
        follow(spec, workload, ssd_dirs, ray_pids)
        until_s = time.monotonic() + _DEADLINE_S
        while find_runner(spec.job, spec.attempt) is not None:  # it still has to release files and memory
            if time.monotonic() > until_s:
                raise WindlassFailedError(f"the runner did not end within {_DEADLINE_S:g} s of its outcome")
            time.sleep(_POLL_S)
    finally:
        ray.shutdown()  # before the daemon ends: a driver without its daemon waits a minute for it


def _end_on_sigterm() -> None:
    """Exits normally on SIGTERM, so that the daemon is ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def job_spec(workload: Workload, folder: Path, home: Path, ssd_dirs: Sequence[Path]) -> JobSpec:
    """Returns the workload as a job of the service, with the threads that the service would assign."""
    compute_threads, optimizer_threads = MachineResources(num_cores=workload.num_threads, num_gpus=0).threads(1)
    return JobSpec(
        job=JobId(f"benchmark-{os.getpid()}"),
        model_dir=str(folder / MODEL_DIR),
        layout_file=str(home / "layout.json"),
        dataset_dir=str(folder / DATASET_DIR),
        job_dir=str(home),
        output_dir=str(home / "trained"),
        ssd_dirs=tuple(str(directory) for directory in ssd_dirs),
        training=TrainingConfig(
            batch_size=workload.batch_size,
            sequence_length=workload.sequence_length,
            learning_rate=workload.learning_rate,
            schedule=Schedule.CONSTANT,
            weight_decay=workload.weight_decay,
            beta1=workload.beta1,
            beta2=workload.beta2,
            epsilon=workload.epsilon,
            clip_norm=None,
            seed=workload.seed,
            total_steps=workload.num_steps,
        ),
        compute_threads=compute_threads,
        optimizer_threads=optimizer_threads,
        kernel_dir=str(folder / "kernels"),
        deadline_s=_DEADLINE_S,
    )


def check_model(spec: JobSpec, home: Path) -> None:
    """Checks the model and writes its layout, as the service does before a job. Raises `WindlassFailedError`."""
    result_path = home / "check.json"
    command = [sys.executable, "-m", "windlass.engine.checkpoint.check_model"]
    command += ["--model-dir", spec.model_dir, "--layout-file", spec.layout_file, "--result", str(result_path)]
    subprocess.run(command, check=True)
    result = json.loads(result_path.read_text())
    if not result["ok"]:
        raise WindlassFailedError(f"the model was refused: {result['error']['message']}")


def follow(spec: JobSpec, workload: Workload, ssd_dirs: Sequence[Path], ray_pids: Sequence[int]) -> None:
    """Reports the job's steps when they are committed, and at the end its SSD bytes and its control time."""
    committed: dict[int, JournalRecord] = {}
    first, last = workload.num_warmup_steps, workload.num_steps
    before = after = {}
    pids: set[int] = set()
    is_training = False
    for record in records(spec):
        if _TRAINING_BEGINS in record.message:
            is_training = True
            emit("ready")
        if record.kind != METRICS:
            continue
        if not is_training:
            raise WindlassFailedError(f"the journal does not say {_TRAINING_BEGINS!r} before the first step")
        step = int(record.data["step"])
        committed[step] = record
        emit("step", index=step - 1, step_s=record.data["step_s"], loss=record.data["train_loss"])
        if step == first:
            emit("timed")
            pids = process_tree([*ray_pids])
            before = thread_seconds(pids)
        elif step == last:
            after = thread_seconds(pids)
            roles = {pid: role_of(pid, ssd_dirs) for pid in pids}
            emit("done")
    if len(committed) != last:
        raise WindlassFailedError(f"{len(committed)} of {last} steps were committed")
    moved = [
        (committed[last].data[name] - committed[first].data[name]) // workload.num_timed_steps
        for name in ("ssd_bytes_read", "ssd_bytes_written")
    ]
    spent = overhead(before, after, roles, workload.num_threads)
    control_s, moving_s = (seconds / workload.num_timed_steps for seconds in (spent.control_s, spent.moving_s))
    emit("totals", values={"ssd_nbytes": moved, "control_s": control_s, "moving_s": moving_s})


def records(spec: JobSpec) -> Iterator[JournalRecord]:
    """Yields the runner's journal records up to its outcome. Raises `WindlassFailedError` if the job fails."""
    from windlass.actors.runtime.ray_runner import find_runner

    reader = JournalReader(Path(spec.job_dir) / JOURNAL_FILE)
    while True:
        alive = find_runner(spec.job, spec.attempt) is not None
        fresh = reader.read_new()
        for record in fresh:
            if record.kind == OUTCOME:
                if record.data["status"] != "succeeded":
                    raise WindlassFailedError(f"the job ended as {record.data['status']}: {record.message}")
                return
            yield record
        if not alive and not fresh:
            raise WindlassFailedError("the runner ended without an outcome")
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
