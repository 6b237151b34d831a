"""Trains a model with random weights as a job, and compares a step with the same model's time without any transfers."""

import dataclasses
import gc
import json
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.activations.memory_need import room_for_activations
from benchmarks.gpu_check.case import NotHereError, Setting
from benchmarks.gpu_check.cases import SpeedCase, States
from benchmarks.gpu_check.compute_alone.peak import peak_step_s
from benchmarks.gpu_check.compute_alone.plain import plain_step_s
from benchmarks.gpu_check.prediction import CasePlan, Predictor, Room, training_of
from benchmarks.gpu_check.watch import HostWaits, Tracer, host_waits
from benchmarks.peers.contenders import SHM_DIR
from benchmarks.peers.schedules import behaving_as
from benchmarks.peers.workload import model_config
from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.pss import MemorySampler, resident_memory
from tests.support.training import has_direct_io, make_spec
from windlass.actors.gpu_worker.memory_usage import release_device_memory
from windlass.actors.job import JOURNAL_FILE, JobSpec, read_journal
from windlass.actors.job.journal import METRICS
from windlass.actors.messages import ComputeBlocks, LoadProgressed, Message, Phase
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.data.examples import FORMAT_VERSION, NO_TARGET
from windlass.engine.memory_plan import ActivationChoice
from windlass.engine.optimizer import AdamSettings, OptimizerKernel
from windlass.storage.ids import ActorName, Kernel
from windlass.storage.memory import arena_room_nbytes, directory_free_nbytes

# Recomputation of every layer, and no recomputation.
RECOMPUTE, KEEP = ActivationChoice.RECOMPUTE, ActivationChoice.KEEP
_NUM_WARMUP = 1  # steps that are not timed
_NUM_TIMED = 3
_BATCHES = 4  # number of different batches
_DEADLINE_S = 120.0
_TRAINED_S = 360.0  # timeout of the training
_SAMPLED_SHARE = 0.01  # maximum share of the time that memory sampling may take
_TINY_MEASURED_S = 0.1


class _EnoughSteps(Exception):
    """Ends a run when enough steps are timed, or its time is up."""


def measure(case: SpeedCase, setting: Setting) -> dict[str, Any]:
    """Plans, predicts and trains the case. Then it times the model without transfers and in plain PyTorch."""
    device = torch.device(setting.device)
    planned, room, block_times = _planned(case, setting, device)
    full_depth, case = case.shape.num_layers, planned.case
    kernel = Kernel.FUSED if setting.is_tiny else _kernel_here(case, setting.root / "kernels")
    trained = _Training(planned, room, setting, kernel).run()
    release_gpu()
    compute_s = {str(choice): _compute_only_s(case, choice, device) for choice in (RECOMPUTE, KEEP)}
    plain_s, plain_note = (None, "not timed for imitations") if case.schedule else plain_step_s(case, device)
    recomputes = all(choice.recompute for choice in planned.choice.of_layers(1))
    step_s, beside_s = statistics.median(trained["step_s"]), compute_s[str(RECOMPUTE if recomputes else KEEP)]
    measured = {
        "model": f"{case.model}, {case.shape.num_layers} of {full_depth} layers",
        "activations": str(planned.choice),
        "kernel": str(kernel),
        **trained,
        "tokens_per_s": case.num_tokens / step_s,
        "compute_only_s": compute_s,
        "step_over_compute_only": None if beside_s is None else step_s / beside_s,
        "plain_step_s": plain_s,
        "plain_note": plain_note,
        "step_over_plain": None if plain_s is None else step_s / plain_s,
        "step_error": abs(setting.predicted["step_s"] / step_s - 1) if setting.predicted else None,
        "block_times": block_times,
    }
    _keep_worst_trace(setting, measured)
    return measured


def _kernel_here(case: SpeedCase, folder: Path) -> Kernel:
    """Compiles the kernel of the updates into the folder. Prints the reason if it returns FUSED."""
    kernel = OptimizerKernel(
        AdamSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1, decoupled=True),
        grad_dtype=torch.float32 if case.num_microbatches > 1 else torch.bfloat16,
        param_dtype=torch.bfloat16,
        state_precision=case.state_precision,
        cache_dir=folder,
        announce=print,
    )
    return kernel.kernel


def _planned(case: SpeedCase, setting: Setting, device: torch.device) -> tuple[CasePlan, Room, dict[str, Any]]:
    """Returns the plan, the room for it, and the times of single blocks. The prediction is written down."""
    link = setting.measured("link")
    predictor = Predictor(case, link.get("hardware"), is_cpu=device.type == "cpu")
    block_times = predictor.measure(device, max_s=_TINY_MEASURED_S) if setting.is_tiny else predictor.measure(device)
    release_gpu()
    arena_nbytes = arena_room_nbytes(SHM_DIR)
    gpu_nbytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else arena_nbytes
    room = Room.of(case, gpu_nbytes, arena_nbytes, directory_free_nbytes(setting.root))
    planned = predictor.plan(room)
    made_elsewhere = setting.plan.get(case.name)
    if made_elsewhere is not None:
        if made_elsewhere["num_layers"] != planned.case.shape.num_layers:
            raise NotHereError(
                f"the plan file has {made_elsewhere['num_layers']} layers, and {planned.case.shape.num_layers} fit"
            )
        setting.predict(case, made_elsewhere)
    elif link:
        setting.predict(case, planned.predicted)
    return planned, room, block_times


def _compute_only_s(case: SpeedCase, choice: ActivationChoice, device: torch.device) -> float | None:
    """Returns the compute-only time, without memory limits, or None if activations do not fit."""
    try:
        return peak_step_s(
            case.shape,
            batch_size=case.batch_size,
            sequence_length=case.sequence_length,
            num_microbatches=case.num_microbatches,
            activations=choice,
            device=device,
        )
    except torch.OutOfMemoryError:
        return None
    finally:
        release_gpu()


def _keep_worst_trace(setting: Setting, measured: dict[str, Any]) -> None:
    """Moves the trace beside the report if this case is the worst so far, and removes it otherwise."""
    trace, over = measured["trace"], measured["step_over_compute_only"]
    measured["trace"] = None
    if trace is None:
        return
    traced = (each.measured for each in setting.results.read().values() if each.measured.get("trace"))
    if over is None or any(each["step_over_compute_only"] >= over for each in traced):
        Path(trace).unlink()
        return
    setting.results.path.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(trace, setting.results.trace_path)
    measured["trace"] = setting.results.trace_path.name


class _Training:
    """The run of a case: steps to warm up, timed steps, one whose waits are counted, and one that is traced."""

    def __init__(self, planned: CasePlan, room: Room, setting: Setting, kernel: Kernel) -> None:
        self._planned, self._setting = planned, setting
        self._folder = setting.root / planned.case.name
        self._folder.mkdir()
        self._spec = _spec(planned, room, self._folder / "job", setting, kernel)
        self._journal = Path(self._spec.job_dir) / JOURNAL_FILE
        self._tracer = Tracer(setting.root / "trace.json.gz")
        self._waits = HostWaits()
        self._until_s = time.monotonic() + _TRAINED_S
        self._is_out_of_time = False
        self._arena_nbytes = 0
        self._memory_stats: dict[str, int] = {}

    def run(self) -> dict[str, Any]:
        """Trains. Raises an exception if it ends before a step is timed."""
        outcome: dict[str, Any] | None = None
        with (
            MemorySampler(lambda: resident_memory(self._arenas())) as sampler,
            host_waits(self._setting.device) as self._waits,
        ):
            sampler.enter_phase("run", share=_SAMPLED_SHARE)
            try:
                outcome = run_local(
                    self._spec,
                    device=self._setting.device,
                    direct=has_direct_io(self._folder),
                    on_message=self._look,
                )
            except _EnoughSteps:
                pass
            finally:
                trace = self._tracer.stop()
            host_peak_nbytes = sampler.peak_nbytes("run")
        if self._is_out_of_time:
            raise NotHereError(f"no step was timed within {_TRAINED_S:g} s")
        if outcome is not None:
            raise RuntimeError(f"the job ended before it was timed: {outcome['error'] and outcome['error']['message']}")
        steps, is_gpu = self._timed_steps(), self._setting.device == "cuda"
        return {
            "step_s": [data["step_s"] for data in steps[:_NUM_TIMED]],
            **_of_timelines([data["timeline"] for data in steps[:_NUM_TIMED]]),
            "busy_s_by_step": [data["timeline"]["busy_s"] for data in steps],
            "swapped_nbytes": steps[0]["activation_bytes_out"],
            "arena_nbytes": self._arena_nbytes,
            "host_peak_nbytes": host_peak_nbytes,
            **self._gpu_memory(),
            "host_waits": self._waits.number if is_gpu and len(steps) > _NUM_TIMED else None,
            "host_waits_by_line": dict(self._waits.by_line.most_common()),
            "trace": None if trace is None else str(trace),
        }

    def _look(self, _to: ActorName, message: Message) -> None:
        """Handles every message between actors. It reads the journal three times a step, which costs nothing."""
        if not isinstance(message, ComputeBlocks | LoadProgressed):
            return
        if not self._arena_nbytes:
            self._arena_nbytes = sum(path.stat().st_size for path in self._arenas())
        is_late = time.monotonic() > self._until_s
        operations = message.operations if isinstance(message, ComputeBlocks) else ()
        if not is_late and not any(each.block == 0 or each.phase is Phase.HEAD for each in operations):
            return
        num_after = len(self._timed_steps()) - _NUM_TIMED
        if num_after >= 0 and not self._memory_stats and self._setting.device == "cuda":
            self._memory_stats = dict(torch.cuda.memory_stats())  # before the watching allocates
        num_watched = 1 if self._planned.case.schedule is not None else 2  # imitations are not traced
        if is_late or num_after >= num_watched:
            self._is_out_of_time = num_after <= -_NUM_TIMED
            raise _EnoughSteps
        self._waits.turn(on=num_after == 0)
        if num_after == 1:
            self._tracer.start()

    def _timed_steps(self) -> list[dict[str, Any]]:
        """Returns the metrics of all reported steps after the warm-up."""
        steps = [record.data for record in read_journal(self._journal) if record.kind == METRICS]
        return steps[_NUM_WARMUP:]

    def _arenas(self) -> Iterator[Path]:
        return Path(self._spec.arena_dir).glob(f"windlass-{self._spec.job}-*.arena")

    def _gpu_memory(self) -> dict[str, Any]:
        """Returns peaks of the caching allocator. On a CPU there are none."""
        stats = self._memory_stats
        reserved = stats.get("reserved_bytes.all.peak")
        return {
            "gpu_peak_nbytes": stats.get("allocated_bytes.all.peak"),
            "gpu_reserved_nbytes": reserved,
            "reserved_over_planned": None if reserved is None else reserved / self._planned.need.reserved_nbytes,
            "num_alloc_retries": stats.get("num_alloc_retries"),
        }


def _of_timelines(timelines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns means over steps: overlap, and busy and stall seconds by cause, the largest first."""
    means: dict[str, Any] = {"overlap_efficiency": statistics.fmean(each["overlap_efficiency"] for each in timelines)}
    for name in ("busy_s", "stall_s"):
        sums: dict[str, float] = defaultdict(float)
        for timeline in timelines:
            for key, seconds in timeline[name].items():
                sums[key] += seconds / len(timelines)
        means[name] = dict(sorted(sums.items(), key=lambda item: -item[1]))
    return means


def _spec(planned: CasePlan, room: Room, folder: Path, setting: Setting, kernel: Kernel) -> JobSpec:
    """Builds the job, with its model, data and SSD below `folder`."""
    case = planned.case
    folder.mkdir(parents=True)
    model_config(case.shape, case.sequence_length).save_pretrained(folder / "model")
    _write_tokens(case, folder / "data")
    spec = make_spec(folder / "base", num_ssds=0)
    spec = dataclasses.replace(
        spec,
        training=training_of(case, kernel),
        model_dir=str(folder / "model"),
        dataset_dir=str(folder / "data"),
        num_validation_examples=0,
        ssd_dirs=(str(folder / "ssd"),) if case.states is States.SSD else (),
        optimizer_threads=max(1, num_cores() - 2),
        kernel_dir=str(setting.root / "kernels"),
        host_memory_nbytes=room.host_nbytes,
        device_memory_nbytes=room.gpu_nbytes if case.has_cap else None,
        planned_device_nbytes=planned.need.nbytes,
        deadline_s=_DEADLINE_S,
    )
    # Kernels of this device may save other tensors than those that the plan counted.
    nbytes = room_for_activations(spec, planned.placement, setting.device)
    placement = dataclasses.replace(planned.placement, host_activation_nbytes=nbytes)
    spec = dataclasses.replace(spec, placement=placement)
    return spec if case.schedule is None else behaving_as(spec, case.schedule, case.shape.num_layers + 2)


def _write_tokens(case: SpeedCase, folder: Path) -> None:
    folder.mkdir()
    num_examples, length = case.batch_size * _BATCHES, case.sequence_length
    tokens = np.random.default_rng(0).integers(0, case.shape.vocab, (num_examples, length), dtype=np.int32)
    targets = np.roll(tokens, -1, axis=1)
    targets[:, -1] = NO_TARGET
    tokens.tofile(folder / "train.tokens")
    targets.tofile(folder / "train.targets")
    np.arange(0, tokens.size + 1, length, dtype=np.int64).tofile(folder / "train.offsets")
    counts = {
        "num_tokens": tokens.size,
        "num_examples": num_examples,
        "num_targets": int((targets != NO_TARGET).sum()),
    }
    meta = {"version": FORMAT_VERSION, "sequence_length": length, "splits": {"train": counts}}
    (folder / "meta.json").write_text(json.dumps(meta))


def release_gpu() -> None:
    """Frees GPU memory, and lifts the limit of a job. Objects of failed runs may be in reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        release_device_memory(torch.device("cuda"))
        torch.cuda.set_per_process_memory_fraction(1.0)
