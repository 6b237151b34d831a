"""Measures the speed of the GPU check's cases, and compares it with the same model's compute-only peak."""

import contextlib
import gc
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.cases import Caps, SpeedCase
from benchmarks.gpu_check.kernels import prepared_kernel
from benchmarks.gpu_check.peak import peak_step_s
from benchmarks.peers.contenders import without_paths
from benchmarks.reporting.pss import MemorySampler, resident_memory
from benchmarks.reporting.report import GIB, ratio, spread, table
from tests.support.training import has_direct_io
from windlass.actors.job import JOURNAL_FILE, JobSpec, read_journal
from windlass.actors.job.journal import METRICS
from windlass.actors.messages import ComputeBlocks, LoadProgressed, Message, Phase
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.memory_plan import ActivationChoice
from windlass.storage.ids import ActorName, Kernel, StatePrecision
from windlass.storage.memory import InsufficientSpaceError

# Recomputation of every layer, and no recomputation.
RECOMPUTE, KEEP = ActivationChoice.RECOMPUTE, ActivationChoice.KEEP
_NUM_WARMUP = 1  # steps that are not timed
_NUM_TIMED = 3  # steps after which a case ends
_CASE_LIMIT_S = 200.0  # timeout of a case
# Maximum share of the time that memory sampling may take.
_SAMPLED_SHARE = 0.01
_REASON_LENGTH = 240


class _EnoughSteps(Exception):
    """Ends a run when enough steps are timed."""


class OutOfTimeError(Exception):
    """Raised if a run has too few steps at its timeout."""


@dataclass(slots=True)
class SpeedRun:
    """The result of a case. `reason` says why there are no measurements."""

    case: SpeedCase
    reason: str | None = None
    is_failure: bool = False  # True: it failed; False: it could not be tried
    step_s: tuple[float, ...] = ()  # timed steps
    timelines: tuple[dict[str, Any], ...] = ()  # of the timed steps
    swapped_nbytes: int = 0  # bytes of activations that left the GPU in the last step
    kernel: Kernel | None = None
    gpu_peak_nbytes: int | None = None  # of the caching allocator; None on a CPU
    host_peak_nbytes: int = 0  # resident memory, with the arena
    arena_nbytes: int = 0
    # Compute-only seconds of a step, by choice for activations. None if these do not fit.
    peak_s: dict[ActivationChoice, float | None] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float | None:
        """The rate of the median step."""
        return self.case.num_tokens / statistics.median(self.step_s) if self.step_s else None

    def share_of_peak(self, choice: ActivationChoice) -> float | None:
        """Returns the speed as a share of the compute-only speed."""
        return ratio(self.peak_s.get(choice), statistics.median(self.step_s)) if self.step_s else None

    @property
    def overlap_efficiency(self) -> float | None:
        """The busy time of the busiest resource, as a share of the step."""
        values = [timeline["overlap_efficiency"] for timeline in self.timelines]
        return statistics.fmean(values) if values else None

    def mean_s(self, name: str) -> dict[str, float]:
        """Returns the mean of `busy_s` or `stall_s` over the steps, the largest first."""
        sums: dict[str, float] = defaultdict(float)
        for timeline in self.timelines:
            for key, seconds in timeline[name].items():
                sums[key] += seconds / len(self.timelines)
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


class _Pace:
    """Watches the messages of a run, and ends it when enough steps are timed or at its timeout."""

    def __init__(self, spec: JobSpec, until_s: float) -> None:
        self._journal = Path(spec.job_dir) / JOURNAL_FILE
        self._until_s = until_s
        self.is_out_of_time = False

    def __call__(self, to: ActorName, message: Message) -> None:
        if not isinstance(message, ComputeBlocks | LoadProgressed):
            return
        is_late = time.monotonic() > self._until_s
        # Look only three times a step, so that it costs nothing.
        operations = message.operations if isinstance(message, ComputeBlocks) else ()
        is_due = any(operation.block == 0 or operation.phase is Phase.HEAD for operation in operations)
        if (is_late or is_due) and len(_timed_steps(self._journal)) >= (1 if is_late else _NUM_TIMED):
            raise _EnoughSteps
        if is_late:
            self.is_out_of_time = True
            raise OutOfTimeError("its time was up before a step was timed")


def measure(
    cases: Sequence[SpeedCase], root: Path, *, device: str, caps: Caps, compiles: bool, until_s: float
) -> Iterator[SpeedRun]:
    """Runs one case after the other below `root`. A failed case does not stop the others."""
    peaks: dict[tuple[Any, ...], float | None] = {}
    kernels: dict[tuple[StatePrecision, bool], Kernel] = {}
    for index, case in enumerate(cases):
        run, folder = SpeedRun(case), root / f"case-{index}"
        left_s = max(0.0, until_s - time.monotonic())
        if left_s < case.expected_s:
            run.reason = f"no time: it takes {case.expected_s:.0f} s or more, and {left_s:.0f} are left"
            yield run
            continue
        try:
            run.kernel = _kernel(case, root / "kernels", kernels) if compiles else Kernel.FUSED
            _train(run, folder, root / "kernels", device=device, caps=caps, until_s=until_s)
            _release_gpu()
            for choice in (RECOMPUTE, KEEP):
                run.peak_s[choice] = _peak_s(case, choice, torch.device(device), peaks)
        except (InsufficientSpaceError, OutOfTimeError) as error:
            run.reason = _in_short(error)
        except Exception as error:  # noqa: BLE001 - a case fails alone
            run.reason, run.is_failure = _in_short(error), True
        _release_gpu()
        shutil.rmtree(folder, ignore_errors=True)
        yield run


def _kernel(case: SpeedCase, folder: Path, kernels: dict[tuple[StatePrecision, bool], Kernel]) -> Kernel:
    key = (case.state_precision, case.num_microbatches > 1)
    if key not in kernels:
        kernels[key] = prepared_kernel(folder, case.state_precision, sums_grads=case.num_microbatches > 1)
    return kernels[key]


def _peak_s(
    case: SpeedCase, choice: ActivationChoice, device: torch.device, peaks: dict[tuple[Any, ...], float | None]
) -> float | None:
    """Returns the compute-only time, without memory limits, or None if activations do not fit."""
    key = (case.model, case.batch_size, case.sequence_length, case.num_microbatches, choice)
    if key not in peaks:
        try:
            peaks[key] = peak_step_s(
                case.shape,
                batch_size=case.batch_size,
                sequence_length=case.sequence_length,
                num_microbatches=case.num_microbatches,
                activations=choice,
                device=device,
            )
        except torch.OutOfMemoryError:
            peaks[key] = None
        _release_gpu()
    return peaks[key]


def _train(run: SpeedRun, folder: Path, kernel_dir: Path, *, device: str, caps: Caps, until_s: float) -> None:
    """Trains a case and stores its results in `run`. Raises an exception if it ends before it is timed."""
    case = run.case
    folder.mkdir()
    spec = case.spec(
        folder / "job",
        device=device,
        host_nbytes=caps.host_nbytes[case.states],
        kernel=run.kernel,
        kernel_dir=kernel_dir,
    )
    pace = _Pace(spec, min(until_s, time.monotonic() + _CASE_LIMIT_S))

    def arenas() -> Iterator[Path]:
        return Path(spec.arena_dir).glob(f"windlass-{spec.job}-*.arena")

    def look(to: ActorName, message: Message) -> None:
        run.arena_nbytes = run.arena_nbytes or sum(path.stat().st_size for path in arenas())
        pace(to, message)

    with MemorySampler(lambda: resident_memory(arenas())) as sampler, _capped(device, caps):
        sampler.enter_phase("run", share=_SAMPLED_SHARE)
        try:
            outcome = run_local(spec, device=device, direct=has_direct_io(folder), on_message=look)
        except _EnoughSteps:
            outcome = None
        finally:
            run.host_peak_nbytes = sampler.peak_nbytes("run")
            run.gpu_peak_nbytes = torch.cuda.max_memory_allocated() if device == "cuda" else None
    if pace.is_out_of_time:
        raise OutOfTimeError("its time was up before a step was timed")
    if outcome is not None:
        raise RuntimeError(f"the job ended before it was timed: {outcome['error'] and outcome['error']['message']}")
    timed = _timed_steps(Path(spec.job_dir) / JOURNAL_FILE)
    run.step_s = tuple(data["step_s"] for data in timed)
    run.timelines = tuple(data["timeline"] for data in timed)
    run.swapped_nbytes = timed[-1]["activation_bytes_out"]


def _timed_steps(journal: Path) -> list[dict[str, Any]]:
    """Returns the metrics of all reported steps after the warm-up."""
    steps = [record.data for record in read_journal(journal) if record.kind == METRICS]
    return steps[_NUM_WARMUP:]


@contextlib.contextmanager
def _capped(device: str, caps: Caps) -> Iterator[None]:
    """Limits the caching allocator in its context."""
    if device != "cuda":
        yield
        return
    total_nbytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, caps.gpu_nbytes / total_nbytes))
    torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _release_gpu() -> None:
    """Frees GPU memory. Objects of failed runs may be in reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _in_short(error: BaseException) -> str:
    return without_paths(f"{type(error).__name__}: {error}")[:_REASON_LENGTH]


# --- report ---------------------------------------------------------------------------------------------------------

_HEADER = (
    "model, states, batch",
    "activations",
    "swapped, GiB a step",
    "step, s",
    "tokens/s",
    "compute-only peak, tokens/s",
    "share of it",
    "share of that with nothing computed again",
    "overlap efficiency",
    "GPU peak, GiB",
    "arena, GiB",
    "host peak, GiB",
    "updates",
)


def tables(runs: Sequence[SpeedRun]) -> list[str]:
    """Returns lines of Markdown: speeds and peaks, busy and stall times, and missing cases."""
    done = [run for run in runs if run.step_s]
    speeds = [
        (
            run.case.name,
            str(run.case.activations),
            _gib(run.swapped_nbytes) if run.swapped_nbytes else "",
            spread(run.step_s),
            f"{run.tokens_per_s:.0f}",
            f"{run.case.num_tokens / peak_s:.0f}" if (peak_s := run.peak_s.get(RECOMPUTE)) else "",
            _number(run.share_of_peak(RECOMPUTE)),
            _number(run.share_of_peak(KEEP)),
            _number(run.overlap_efficiency),
            _gib(run.gpu_peak_nbytes),
            _gib(run.arena_nbytes),
            _gib(run.host_peak_nbytes),
            f"{run.kernel}, {run.case.state_precision} states",
        )
        for run in done
    ]
    times = [(run.case.name, _seconds(run.mean_s("busy_s")), _seconds(run.mean_s("stall_s"))) for run in done]
    missing = [(run.case.name, "failed" if run.is_failure else "not timed", run.reason) for run in runs if run.reason]
    return [
        *table(_HEADER, speeds),
        "",
        *table(("model, states, batch", "busy, s a step", "nothing computed, s a step, by cause"), times),
        *(["", *table(("missing", "", "reason"), missing)] if missing else []),
    ]


def keys(runs: Sequence[SpeedRun], cases: Sequence[SpeedCase]) -> dict[str, Any]:
    """Returns the figures of every case; null if it has not run."""
    by_name = {run.case.name: run for run in runs}

    def of(value: Callable[[SpeedRun], float | None]) -> dict[str, float | None]:
        runs_by_name = {case.name: by_name.get(case.name) for case in cases}
        return {name: None if run is None else value(run) for name, run in runs_by_name.items()}

    shares: dict[str, list[float]] = {case.states: [] for case in cases}
    for run in runs:
        share = run.share_of_peak(RECOMPUTE)
        if share is not None and run.case.batch_size >= 16 and run.case.system is None:
            shares[run.case.states].append(share)
    return {
        "share_of_peak_min_from_batch_16": {states: min(found, default=None) for states, found in shares.items()},
        "tokens_per_s": of(lambda run: run.tokens_per_s),
        "share_of_peak": of(lambda run: run.share_of_peak(RECOMPUTE)),
        "share_of_peak_without_recompute": of(lambda run: run.share_of_peak(KEEP)),
        "overlap_efficiency": of(lambda run: run.overlap_efficiency),
        "gpu_peak_gib": of(lambda run: None if run.gpu_peak_nbytes is None else run.gpu_peak_nbytes / GIB),
        "host_peak_gib": of(lambda run: run.host_peak_nbytes / GIB if run.step_s else None),
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.2f}"


def _seconds(by_name: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in by_name.items() if seconds >= 0.005)
