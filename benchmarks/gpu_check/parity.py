"""Checks that windlass computes on this GPU what plain PyTorch computes there.

Released buffers are filled with NaN. If a stream reads a buffer too early, or fills it too early, the loss becomes NaN.
With more operations in flight, the streams run further behind.
"""

import contextlib
import dataclasses
import math
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.activations.memory_need import room_for_activations
from benchmarks.peers.contenders import without_paths
from benchmarks.reporting.report import table
from tests.support.reference_loop import train_plainly
from tests.support.training import has_direct_io, losses_of, make_partition, make_spec, metrics_of
from windlass.actors.job import JobSpec
from windlass.actors.messages import ComputeProgressed, Message, Phase
from windlass.actors.policy import Ordering
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.memory_plan import ActivationChoice, Placement
from windlass.storage.ids import ActorName, Kernel, Precision

# Maximum relative difference of any loss.
LIMITS = {Precision.FP32: 1e-5, Precision.BF16: 1e-3, Precision.FP16: 1e-3}
PLACES = ("SSD", "host", "device")
NUM_STEPS = 30
# Choices for activations, and whether swapped ones go to the SSDs.
ACTIVATIONS = (*((choice, False) for choice in ActivationChoice), (ActivationChoice.SWAP, True))
_EXPECTED_S = {Kernel.FUSED: 10.0, None: 60.0}  # seconds that must be left to start a case, by kernel
_REASON_LENGTH = 240  # maximum characters of an error in the report


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """One run that is compared with plain PyTorch."""

    precision: Precision
    activations: ActivationChoice
    swaps_to_ssd: bool
    place: str  # tier of the model states
    num_microbatches: int
    is_tied: bool
    kernel: Kernel | None  # None: compiled if there is a compiler
    num_ahead: int  # operations in flight
    is_streamed: bool = False  # layers are copied to the device in pieces

    @property
    def columns(self) -> tuple[str, ...]:
        """The cells of its table row."""
        activations = f"{self.activations}, to SSD" if self.swaps_to_ssd else str(self.activations)
        kernel, num_ahead = str(self.kernel or "compiled if possible"), str(self.num_ahead)
        numbers = (str(self.num_microbatches), str(self.is_tied), kernel, num_ahead)
        place = f"{self.place}, in pieces" if self.is_streamed else self.place
        return (str(self.precision), activations, place, *numbers)

    def placed(self, spec: JobSpec, num_blocks: int, device: str) -> JobSpec:
        """Returns the job with the case's placement."""
        blocks = tuple(range(num_blocks))
        placement = Placement(
            host_blocks=blocks if self.place == "host" else (),
            device_blocks=blocks if self.place == "device" else (),
            streamed_blocks=blocks[1:-1] if self.is_streamed else (),
            activations=self.activations.of_layers(num_blocks - 2),
        )
        nbytes = room_for_activations(spec, placement, device)
        placement = dataclasses.replace(
            placement,
            host_activation_nbytes=0 if self.swaps_to_ssd else nbytes,
            ssd_activation_nbytes=nbytes if self.swaps_to_ssd else 0,
        )
        return dataclasses.replace(spec, placement=placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRun:
    """The result of a case."""

    case: ParityCase
    difference: float | None = None  # maximum relative difference of any loss
    swapped_nbytes: int = 0  # bytes that left the device in a step
    num_waits: int = 0  # times that the host waited for the device, after the second step
    reason: str = ""  # why there is no difference
    is_failure: bool = False
    took_s: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """True if it failed, the host waited, or its losses differ from plain PyTorch's."""
        return (
            self.is_failure
            or self.num_waits > 0
            or (self.difference is not None and self.difference > LIMITS[self.case.precision])
        )


def cases(*, compiles: bool) -> list[ParityCase]:
    """Returns every precision with every choice for activations. The other settings vary from case to case.

    Then follow the same choices with streamed layers. Last, with `compiles`, follow kernels compiled for the device,
    which takes a while.
    """
    uncompiled = []
    for i, (precision, (activations, swaps_to_ssd)) in enumerate(product(LIMITS, ACTIVATIONS)):
        # Each choice for activations meets every place, and both values of every other setting.
        case = ParityCase(
            precision=precision,
            activations=activations,
            swaps_to_ssd=swaps_to_ssd,
            place=PLACES[i % 3],
            num_microbatches=(1, 4)[i % 2],
            is_tied=i // 2 % 2 == 1,
            kernel=Kernel.FUSED,
            num_ahead=(2, 5)[i // len(ACTIVATIONS) % 2],
        )
        uncompiled.append(case)
    streamed = [dataclasses.replace(case, is_streamed=True) for case in uncompiled if case.place == "SSD"]
    compiled = []
    if compiles:
        changes: dict[str, Any] = {"place": "device", "kernel": None, "num_microbatches": 1}
        compiled = [
            dataclasses.replace(case, **changes)
            for case in uncompiled
            if case.activations is ActivationChoice.RECOMPUTE
        ]
    return [*uncompiled, *streamed, *compiled]


def measure(
    cases: Sequence[ParityCase], root: Path, *, device: str, num_steps: int, until_s: float
) -> Iterator[ParityRun]:
    """Runs one case after the other below `root`. A failed case does not stop the others."""
    expected: dict[tuple[Precision, int, bool], list[float]] = {}
    for index, case in enumerate(cases):
        start_s, folder = time.monotonic(), root / f"parity-{index}"
        if until_s - start_s < _EXPECTED_S[case.kernel]:
            yield ParityRun(case=case, reason="no time is left")
            continue
        try:
            with host_waits(device) as waits:
                spec = _train(case, folder, device, num_steps, waits)
            key = (case.precision, case.num_microbatches, case.is_tied)
            if key not in expected:
                expected[key] = train_plainly(spec, device).losses
            yield ParityRun(
                case=case,
                difference=_largest_difference(losses_of(spec), expected[key]),
                swapped_nbytes=_swapped_nbytes(case, spec),
                num_waits=waits.number,
                took_s=time.monotonic() - start_s,
            )
        except Exception as error:  # noqa: BLE001 - a case fails alone
            reason = without_paths(f"{type(error).__name__}: {error}")[:_REASON_LENGTH]
            yield ParityRun(case=case, reason=reason, is_failure=True, took_s=time.monotonic() - start_s)
        shutil.rmtree(folder, ignore_errors=True)


class HostWaits:
    """Counts how often torch makes the host wait for a GPU, from the third step on."""

    def __init__(self, seen: list[warnings.WarningMessage]) -> None:
        self._seen = seen

    def look(self, _: ActorName, message: Message) -> None:
        """Handles every message between actors."""
        computed = message.computed if isinstance(message, ComputeProgressed) else ()
        if any((each.phase, each.step) == (Phase.HEAD, 2) for each in computed):
            torch.cuda.set_sync_debug_mode("warn")

    @property
    def number(self) -> int:
        """The number of waits so far."""
        return sum("synchronizing CUDA operation" in str(each.message) for each in self._seen)


@contextlib.contextmanager
def host_waits(device: str) -> Iterator[HostWaits]:
    """Counts the host's waits in its context. On a CPU there are none."""
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(warnings.catch_warnings(record=True)) if device != "cpu" else []
        assert seen is not None, "they are recorded"
        if device != "cpu":
            warnings.simplefilter("always")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield HostWaits(seen)


def _train(case: ParityCase, folder: Path, device: str, num_steps: int, waits: HostWaits) -> JobSpec:
    """Trains a case and returns its job. Raises RuntimeError if it fails."""
    spec = make_spec(
        folder,
        tied=case.is_tied,
        precision=case.precision,
        num_microbatches=case.num_microbatches,
        kernel=case.kernel,
        kernel_dir=str(folder.parent / "kernels"),
        total_steps=num_steps,
        evaluate_every=None,
        num_validation_examples=0,
        ordering=Ordering(max_prefetched=case.num_ahead),
    )
    partition = make_partition(spec)
    spec = case.placed(spec, len(partition.layout.blocks), device)
    outcome = run_local(
        spec,
        partition=partition,
        device=device,
        poison_released=True,
        direct=has_direct_io(folder),
        on_message=None if device == "cpu" else waits.look,
    )
    if outcome["status"] != "succeeded":
        raise RuntimeError(outcome["error"]["message"])
    return spec


def _largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative difference. Raises RuntimeError if a loss is not finite."""
    if not all(map(math.isfinite, (*losses, *expected))):
        raise RuntimeError(f"losses are not finite: {list(losses)}, and plain PyTorch's: {list(expected)}")
    return max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))


def _swapped_nbytes(case: ParityCase, spec: JobSpec) -> int:
    """Returns the bytes of activations that left the device in the last step.

    Raises RuntimeError if they do not match the choice.
    """
    nbytes = int(list(metrics_of(spec, "activation_bytes_out").values())[-1])
    if (nbytes > 0) != any(choice.swaps for choice in spec.placement.activations):
        raise RuntimeError(f"{nbytes} bytes of activations left the device, with the choice {case.activations}")
    return nbytes


def tables(runs: Sequence[ParityRun]) -> list[str]:
    """Returns the table as lines of Markdown."""
    rows = []
    for run in runs:
        verdict = "WAITS" if run.num_waits else "DIFFERS" if run.is_wrong else "equal"
        if run.difference is None:
            verdict = f"{'FAILED' if run.is_failure else 'not tried'}: {run.reason}"
        difference = "" if run.difference is None else f"{run.difference:.1e}"
        swapped = f"{run.swapped_nbytes / 2**20:.1f}" if run.swapped_nbytes else ""
        limit = f"{LIMITS[run.case.precision]:.0e}"
        rows.append((*run.case.columns, swapped, str(run.num_waits), difference, limit, verdict, f"{run.took_s:.1f}"))
    settings = ("precision", "activations", "states on", "micro-batches", "tied", "kernel", "operations at once")
    results = ("swapped, MiB a step", "waits of the host", "largest loss difference", "limit", "", "took, s")
    return table((*settings, *results), rows)


def keys(runs: Sequence[ParityRun]) -> dict[str, Any]:
    """Returns the largest difference for each precision; null if no case of it has run."""
    largest: dict[str, float | None] = {}
    for precision in LIMITS:
        differences = [run.difference for run in runs if run.case.precision is precision and run.difference is not None]
        largest[str(precision)] = max(differences, default=None)
    return {"loss_difference_max": largest, "num_wrong": sum(run.is_wrong for run in runs)}
