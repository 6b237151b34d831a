"""The scenarios of the race checker: jobs in all modes, an offloaded model, and single parts."""

import contextlib
import functools
import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actors.offload_models import Gpt, gpt_loss, offloaded, seeded
from tests.support.races.checker import Report
from tests.support.races.cuda import DEVICE, DEVICES
from tests.support.races.parts import PARTS
from tests.support.races.run import QUIET_S, Recording, recorded
from tests.support.races.sites import Site
from tests.support.stream_jobs import JOBS
from tests.support.training import has_direct_io, make_partition, make_spec
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.gpu_worker.grad_offload import GradOffload
from windlass.actors.messages import ComputeBlock, UpdateBlock
from windlass.actors.optimizer.chunk_updater import ChunkUpdater
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.device.cuda_streams import CudaStream
from windlass.engine.memory_plan import buffer_counts
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.arena import layout as arena_layout
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import Precision

Scenario = Callable[[Path, Recording], None]

_SLOT_NBYTES = 4096
_TOTAL_PART_NUMEL = 1000  # so that a total comes in several parts
_DEADLINE_S = 20.0
MODES: dict[str, dict[str, Any]] = {
    **JOBS,
    "swapped to SSDs": {
        "placement": Placement(
            activations=ActivationChoice.SWAP.of_layers(3),
            host_activation_nbytes=1 << 16,
            ssd_activation_nbytes=4 << 20,
        ),
    },
    "fp16": {"precision": Precision.FP16},
    "poisoned": {"precision": Precision.BF16, "poison_released": True},
    "ranks": {"precision": Precision.BF16, "num_ranks": 2, "num_microbatches": 3},
    "ranks in pieces": {
        "precision": Precision.BF16,
        "num_ranks": 2,
        "num_microbatches": 4,
        "lanes": 2,
        "placement": Placement(streamed_blocks=(1, 2, 3), streams_grads=True),
    },
    "slices in pieces": {
        "precision": Precision.BF16,
        "accumulation_precision": Precision.BF16,
        "num_microbatches": 3,
        "clip_norm": 0.5,
        "cut_matrices": 1800,
        "placement": Placement(
            streamed_blocks=(1, 2, 3), streams_grads=True, streams_ends=True, group_size=2, num_cached_params=2
        ),
    },
    "ranks in rounds": {
        "clip_norm": 0.5,
        "tied": True,
        "num_ranks": 2,
        "num_microbatches": 3,
        "placement": Placement(group_size=1, streamed_blocks=(2, 3), num_cached_params=2),
    },
}
OFFLOADED: dict[str, dict[str, Any]] = {
    "on SSDs": {},
    "poisoned": {"poison_released": True},
    "clipped": {"clip_norm": 0.5},
    "in memory": {"host_memory_gib": 1.0},
    "two backward passes": {"backwards_per_step": 2},
}


def run_job(mode: str, directory: Path, _: Recording, *, num_steps: int = 3) -> None:
    """Trains a tiny model in a mode, with an evaluation."""
    outcome = _train(directory, num_steps=num_steps, **MODES[mode])
    assert outcome["status"] == "succeeded", outcome


def _train(directory: Path, *, num_steps: int, poison_released: bool = False, **changes: Any) -> dict[str, Any]:
    spec = make_spec(directory / "job", total_steps=num_steps, evaluate_every=2, **changes)
    return run_local(
        spec,
        partition=make_partition(spec),
        device=[str(device) for device in DEVICES[: spec.num_ranks]],
        direct=has_direct_io(directory / "job"),
        poison_released=poison_released,
    )


def run_offloaded(mode: str, directory: Path, _: Recording) -> None:
    """Trains an offloaded model and reads its weights."""
    options = {"poison_released": False, "device": str(DEVICE), **OFFLOADED[mode]}
    with offloaded(seeded(Gpt), directory, num_ssds=1, **options) as (model, optimizer):
        for step in range(2 * options.get("backwards_per_step", 1)):
            gpt_loss(model, step).backward()
            if (step + 1) % options.get("backwards_per_step", 1) == 0:
                optimizer.step()
        model.state_dict()


def run_early_gradients(directory: Path, recording: Recording) -> None:
    """Trains a tiny model whose gradients leave as soon as they are queued, not when the device has reported them."""
    operations: dict[int, ComputeBlock] = {}
    buffer, complete, computed = GradOffload.buffer, GradOffload.complete, GradOffload.computed

    def buffer_noted(grads: GradOffload, operation: ComputeBlock, block: Any, dtype: torch.dtype) -> Any:
        operations[operation.block] = operation
        return buffer(grads, operation, block, dtype)

    def complete_at_once(grads: GradOffload, block: Any, on_complete: Any, received: Any) -> None:
        complete(grads, block, on_complete, received)
        computed(grads, operations[block], (1.0,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradOffload, "buffer", buffer_noted)
        patch.setattr(GradOffload, "complete", complete_at_once)
        patch.setattr(GradOffload, "computed", lambda *_: None)
        run_job("active", directory, recording, num_steps=2)


def run_sliced_job(directory: Path, recording: Recording) -> None:
    """Trains a tiny model whose head has slices. Their sums go out and come back in fp32, and leave in 16 bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 16)
        run_job("slices in pieces", directory, recording)


def run_failing_job(directory: Path, _: Recording) -> None:
    """Fails a job between two steps. The worker stops while a thread is between a copy and its callback."""
    is_failing, is_late = threading.Event(), threading.Event()
    update, then = ChunkUpdater.update, CudaStream.then

    def fail(updater: ChunkUpdater, message: UpdateBlock, *args: Any) -> None:
        is_failing.set()
        if message.block == 2:  # the first block is updated, and its params are on their way
            assert is_late.wait(_DEADLINE_S)
            raise RuntimeError("a test fails the job")
        update(updater, message, *args)

    def then_late(stream: CudaStream, callback: Callable[[], None]) -> None:
        if is_failing.is_set() and "_run_arrivals" in threading.current_thread().name:
            is_late.set()
            stream._callbacks._token.pause(_DEADLINE_S)
            time.sleep(0.2)  # until the stream's thread has ended
        then(stream, callback)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkUpdater, "update", fail)
        patch.setattr(CudaStream, "then", then_late)
        assert _train(directory, num_steps=4, **MODES["kept"])["status"] == "interrupted"


SCENARIOS: dict[str, Scenario] = {
    **{f"job: {mode}": functools.partial(run_job, mode) for mode in MODES},
    **{f"offload: {mode}": functools.partial(run_offloaded, mode) for mode in OFFLOADED},
    "job: early gradients": run_early_gradients,
    "job: slices in pieces": run_sliced_job,
    "job: failing": run_failing_job,
    **{f"part: {name}": part for name, part in PARTS.items()},
}


def reports_of(
    name: str, directory: Path, dropped: Site | None = None, *, quiet_s: float = QUIET_S
) -> tuple[list[Report], int]:
    """Runs a scenario under the checker; returns its reports, and how often `dropped` was left out."""
    directory.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        # The check computes in its calling thread, on a device of its own.
        patch.setattr(gpu_worker, "check_architecture", lambda *_: None)
        patch.setattr(arena_layout, "ACTIVATION_SLOT_NBYTES", _SLOT_NBYTES)
        patch.setattr(buffer_counts, "_TOTAL_PART_NUMEL", _TOTAL_PART_NUMEL)
        if dropped is not None:  # what is left out can also fail a thread
            patch.setattr(threading, "excepthook", lambda _: None)
        with recorded(dropped, quiet_s=quiet_s) as recording, contextlib.redirect_stderr(io.StringIO()):
            try:
                SCENARIOS[name](directory, recording)
            except Exception:
                if not recording.checker.num_dropped:
                    raise
    return recording.checker.finish(), recording.checker.num_dropped


def reports_without(site: Site, name: str, directory: Path) -> list[Report]:
    """Runs a scenario without a call; returns the reports that name it.

    On a busy machine threads may see work of the device end earlier than they need to. So the device is made later
    until there is a report.
    """
    for quiet_s in (QUIET_S, 0.01, 0.1):
        reports, num_dropped = reports_of(name, directory / f"quiet for {quiet_s} s", site, quiet_s=quiet_s)
        assert num_dropped, "the scenario comes to the call"
        if named := [report for report in reports if report.missing == site.name]:
            return named
    return []
