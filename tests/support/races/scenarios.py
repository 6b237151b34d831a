"""What is run under the race checker: jobs in all modes, an offloaded model, and single parts.

Parts are driven in ways that jobs rarely or never use, so that the order which messages ensure in a job is absent.
"""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actors.offload_models import Gpt, gpt_loss, offloaded, seeded
from tests.support.races.checker import Report
from tests.support.races.cuda import DEVICE
from tests.support.races.run import Recording, recorded
from tests.support.races.sites import Site
from tests.support.stream_jobs import JOBS
from tests.support.training import has_direct_io, make_partition, make_spec
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.gpu_worker.grad_offload import GradOffload
from windlass.actors.messages import ComputeBlock
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.activations.host_store import HostActivations
from windlass.engine.device.device import Device
from windlass.engine.memory_plan import plan as memory_plan
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.memory.arena import SlotPool

Scenario = Callable[[Path, Recording], None]

_SLOT_NBYTES = 4096
_DEADLINE_S = 20.0
MODES: dict[str, dict[str, Any]] = {
    **JOBS,
    "swapped to SSDs": {
        "placement": Placement(
            activations=ActivationChoice.SWAP.of_layers(3),
            host_activation_nbytes=1 << 16,
            ssd_activation_nbytes=2 << 20,
        ),
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
    spec = make_spec(directory / "job", total_steps=num_steps, evaluate_every=2, **MODES[mode])
    outcome = run_local(
        spec, partition=make_partition(spec), device=str(DEVICE), direct=has_direct_io(directory / "job")
    )
    assert outcome["status"] == "succeeded", outcome


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

    def complete_at_once(grads: GradOffload, block: Any, on_complete: Any) -> None:
        complete(grads, block, on_complete)
        computed(grads, operations[block], 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradOffload, "buffer", buffer_noted)
        patch.setattr(GradOffload, "complete", complete_at_once)
        patch.setattr(GradOffload, "computed", lambda *_: None)
        run_job("active", directory, recording, num_steps=2)


@contextlib.contextmanager
def _activations(recording: Recording, num_slots: int = 4) -> Iterator[tuple[Device, HostActivations]]:
    memory = torch.zeros(num_slots * _SLOT_NBYTES, dtype=torch.uint8)
    recording.memory.add_arena(memory, "activations")
    device = Device(DEVICE)
    slots = SlotPool(0, _SLOT_NBYTES, num_slots, name="activations")
    store = HostActivations(device, memory, slots, max_leaving_nbytes=memory.nbytes, deadline_s=_DEADLINE_S)
    try:
        yield device, store
    finally:
        store.stop()
        device.close()


def _computed(device: Device) -> torch.Tensor:
    """Returns a tensor that the compute stream has filled."""
    tensors: list[torch.Tensor] = []
    device.compute.run(lambda: tensors.append(torch.ones(_SLOT_NBYTES, dtype=torch.uint8, device=DEVICE)))
    return tensors.pop()


def run_activations(directory: Path, recording: Recording) -> None:
    """Puts activations into host memory and gets them back, or drops them at each stage."""
    with _activations(recording) as (device, store):
        for _ in range(2):
            fetched, dropped, dropped_late = (store.put(_computed(device)) for _ in range(3))
            store.drop(dropped)
            for handle in (fetched, dropped_late):
                store.prefetch(handle)
            store.drop(dropped_late)
            tensor = store.get(fetched)
            device.compute.run(lambda tensor=tensor: tensor.add(1))
            del tensor
        device.synchronize()


def run_blocking_copies(directory: Path, recording: Recording) -> None:
    """Copies buffers in and out while the caller waits, and reuses them."""
    host = torch.zeros(2 * _SLOT_NBYTES, dtype=torch.uint8)
    recording.memory.add_arena(host, "copies")
    device = Device(DEVICE, poison_released=True)
    for _ in range(2):
        buffer = device.take(_SLOT_NBYTES // 4, torch.float32)
        device.copy_in(buffer, host[:_SLOT_NBYTES].view(torch.float32))
        host[:_SLOT_NBYTES] = 1
        device.compute.run(lambda buffer=buffer: buffer.add_(1))
        device.synchronize()
        device.copy_out(host[_SLOT_NBYTES:].view(torch.float32), buffer)
        host[_SLOT_NBYTES:].sum()
        device.give(buffer)
    device.close()


PARTS: dict[str, Scenario] = {
    "early gradients": run_early_gradients,
    "activations": run_activations,
    "blocking copies": run_blocking_copies,
}
SCENARIOS: dict[str, Scenario] = {
    **{f"job: {mode}": functools.partial(run_job, mode) for mode in MODES},
    **{f"offload: {mode}": functools.partial(run_offloaded, mode) for mode in OFFLOADED},
    **{f"part: {name}": part for name, part in PARTS.items()},
}


def reports_of(name: str, directory: Path, dropped: Site | None = None) -> tuple[list[Report], int]:
    """Runs a scenario under the checker; returns its reports, and how often `dropped` was left out."""
    directory.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        # The check computes in its calling thread, on a device of its own.
        patch.setattr(gpu_worker, "check_architecture", lambda *_: None)
        patch.setattr(memory_plan, "ACTIVATION_SLOT_NBYTES", _SLOT_NBYTES)
        with recorded(dropped) as recording, contextlib.redirect_stderr(io.StringIO()):
            try:
                SCENARIOS[name](directory, recording)
            except Exception:
                if not recording.checker.num_dropped:
                    raise
    return recording.checker.finish(), recording.checker.num_dropped
