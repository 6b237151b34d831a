"""The device memory of a whole job equals the computed need, and stays within the budget."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.training import boxes_of, has_direct_io, journal_of, make_partition, make_spec
from windlass.actors.gpu_worker import worker
from windlass.actors.gpu_worker.compute import Computation
from windlass.actors.gpu_worker.device_optimizer import DeviceStates
from windlass.actors.gpu_worker.memory_usage import limit_device_memory
from windlass.actors.gpu_worker.worker import evaluation_groups
from windlass.actors.job import device_memory_check as device_room
from windlass.actors.job.context import make_context
from windlass.actors.job.device_memory_check import device_need_of_job, evaluation_shapes, require_device_room
from windlass.actors.job.spec import JobSpec
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.worker_policy.stages import Stage
from windlass.amounts import GIB, bytes_text
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.device.buffer_pool import DeviceBuffers
from windlass.engine.device.device import Device
from windlass.engine.device.overlaid_buffers import OverlaidBuffers
from windlass.engine.memory_estimate.dry_run import DeviceNeedUnknownError
from windlass.engine.memory_estimate.live_storages import LiveStorageTracker
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.buffer_counts import NUM_GATHERED_CHUNKS
from windlass.engine.memory_plan.plan import Placement, PlanError
from windlass.engine.model.streaming.params import PieceBuffers
from windlass.engine.optimizer.grad_norm import NormInParts
from windlass.engine.pieces.chunk_norms import ChunkNorms
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import Precision, StatePrecision

KEEP, SWAP = ActivationChoice.KEEP.of_layers(3), ActivationChoice.SWAP.of_layers(3)
ALL_IN_PIECES = Placement(streamed_blocks=(1, 2, 3), streams_grads=True, streams_ends=True, num_grad_buffers=1)
JOBS: dict[str, dict[str, Any]] = {
    "all computed again": {},
    "half precision": {"precision": Precision.BF16},
    "sums of micro-batches": {"precision": Precision.BF16, "num_microbatches": 4},
    "lanes": {"precision": Precision.BF16, "num_microbatches": 4, "lanes": 2, "tied": True},
    "groups that end inside of lanes": {
        "num_microbatches": 4,
        "lanes": 2,
        "tied": True,
        "placement": Placement(group_size=3, device_blocks=(2,)),
    },
    "groups, all kept": {"num_microbatches": 4, "placement": Placement(group_size=3, activations=KEEP)},
    "states on the device, tied": {
        "precision": Precision.BF16,
        "state_precision": StatePrecision.SPLIT,
        "tied": True,
        "placement": Placement(device_blocks=(0, 2)),
    },
    "states on the device, params made of the master": {
        "precision": Precision.BF16,
        "tied": True,
        "placement": Placement(device_blocks=(0, 2)),
    },
    "layers in pieces": {"placement": Placement(streamed_blocks=(1, 2, 3))},
    "params of all blocks in pieces": {"placement": Placement(streamed_blocks=(1, 2, 3), streams_ends=True)},
    "gradients of layers in pieces": {
        "precision": Precision.BF16,
        "num_microbatches": 4,
        "placement": Placement(streamed_blocks=(1, 2, 3), streams_grads=True, group_size=2),
    },
    "all in pieces": {"precision": Precision.BF16, "placement": ALL_IN_PIECES},
    "all in pieces, summed": {"precision": Precision.BF16, "num_microbatches": 4, "placement": ALL_IN_PIECES},
    "all in parts": {"precision": Precision.BF16, "cut_matrices": 1800, "placement": ALL_IN_PIECES},
    "all in parts, in slices of the head": {
        "precision": Precision.BF16,
        "cut_matrices": 1800,
        "placement": ALL_IN_PIECES,
    },
    "all in parts, summed": {
        "precision": Precision.BF16,
        "num_microbatches": 4,
        "cut_matrices": 1800,
        "placement": ALL_IN_PIECES,
    },
    "all in pieces, tied": {"precision": Precision.BF16, "tied": True, "placement": ALL_IN_PIECES},
    "params of all blocks in pieces, tied": {
        "tied": True,
        "cut_matrices": 1800,
        "placement": Placement(streamed_blocks=(1, 2, 3), streams_ends=True),
    },
    "all in parts, tied": {"precision": Precision.BF16, "tied": True, "cut_matrices": 1800, "placement": ALL_IN_PIECES},
    "all in parts, tied and summed": {
        "num_microbatches": 4,
        "tied": True,
        "cut_matrices": 1800,
        "placement": ALL_IN_PIECES,
    },
    "whole blocks in parts, tied": {"precision": Precision.BF16, "tied": True, "cut_matrices": 1800},
    "whole blocks in parts": {"precision": Precision.BF16, "cut_matrices": 1800},
    "all in pieces, in lanes": {
        "precision": Precision.FP16,
        "num_microbatches": 4,
        "lanes": 2,
        "placement": ALL_IN_PIECES,
    },
    "cut matrices": {"precision": Precision.BF16, "num_microbatches": 2, "cut_matrices": 1800},
    "cut matrices in pieces": {
        "num_microbatches": 2,
        "cut_matrices": 1800,
        "placement": Placement(streamed_blocks=(1, 2, 3), activations=KEEP),
    },
    "all swapped": {
        "precision": Precision.BF16,
        "num_microbatches": 2,
        "placement": Placement(activations=SWAP, host_activation_nbytes=4 << 20, ssd_activation_nbytes=4 << 20),
    },
}


# Bytes: a head's two losses, and its number of correct tokens; too small to be part of the computed need.
LOSSES_NBYTES = 4 + 4 + 8


class Found:
    """Records the device memory that a job really allocates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffers = {"params": 0, "gradients": 0}
        self.states_nbytes = self.activations_nbytes = 0
        self._living = LiveStorageTracker(torch.device("cpu"))
        self._watch_buffers(monkeypatch)
        self._watch_grads_in_pieces(monkeypatch)
        self._watch_states(monkeypatch)
        self._watch_compute(monkeypatch)

    def _watch_buffers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make_buffers, make_pieces = DeviceBuffers.__init__, PieceBuffers.__init__

        def note_buffers(each: Any, device: Any, classes: Any, *, name: str) -> None:
            sizes = (number * numel * dtype.itemsize for (numel, dtype), number in classes.items())
            self.buffers[name] += sum(sizes)
            make_buffers(each, device, classes, name=name)

        def note_pieces(each: Any, device: Any, numel: int, dtype: torch.dtype, num_buffers: int) -> None:
            self.buffers["params"] += num_buffers * numel * dtype.itemsize
            make_pieces(each, device, numel, dtype, num_buffers)

        monkeypatch.setattr(DeviceBuffers, "__init__", note_buffers)
        monkeypatch.setattr(PieceBuffers, "__init__", note_pieces)

    def _watch_grads_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make_overlay, make_norm, make_norms = OverlaidBuffers.__init__, NormInParts.__init__, ChunkNorms.__init__
        self._norms_nbytes = 0

        def note_overlay(each: Any, *args: Any, **kwargs: Any) -> None:
            make_overlay(each, *args, **kwargs)
            self.buffers["gradients"] += each._memory.nbytes

        def note_norms(nbytes: int) -> None:
            self.buffers["gradients"] += max(0, nbytes - self._norms_nbytes)
            self._norms_nbytes = max(nbytes, self._norms_nbytes)

        def note_norm(each: Any, bounds: Any, *args: Any, **kwargs: Any) -> None:
            make_norm(each, bounds, *args, **kwargs)
            if len(bounds) > 2:  # else of a whole gradient
                note_norms(each._squares.nbytes)

        def note_chunks(each: Any, numel: int, chunk_numel: int, device: torch.device) -> None:
            make_norms(each, numel, chunk_numel, device)
            note_norms(min(numel, NUM_GATHERED_CHUNKS * chunk_numel) * torch.float32.itemsize)  # at most at once

        monkeypatch.setattr(OverlaidBuffers, "__init__", note_overlay)
        monkeypatch.setattr(NormInParts, "__init__", note_norm)
        monkeypatch.setattr(ChunkNorms, "__init__", note_chunks)

    def _watch_states(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make = DeviceStates.__init__

        def note(each: Any, *args: Any, **kwargs: Any) -> None:
            make(each, *args, **kwargs)
            self.states_nbytes = sum(state.nbytes for states in each._states.values() for state in states.values())

        monkeypatch.setattr(DeviceStates, "__init__", note)

    def _watch_compute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compute = Computation.compute

        def watch(*args: Any) -> None:
            self._living.begin()
            with self._living:
                compute(*args)
            self.activations_nbytes = max(self.activations_nbytes, self._living.peak_nbytes)

        monkeypatch.setattr(Computation, "compute", watch)


@pytest.mark.short("states on the device, tied", "layers in pieces")
@pytest.mark.usefixtures("unchecked_activations", "small_activation_slots")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (i % 2)) for i, name in enumerate(JOBS)]
)
def test_job_allocates_the_computed_device_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    is_sliced = "in slices" in name
    if is_sliced:
        monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 16)
    spec = make_spec(
        tmp_path, total_steps=1, evaluate_every=None, num_validation_examples=0, sequence_length=48, **JOBS[name]
    )
    hyper = spec.training
    # As large as the micro-batch of its one step.
    batch = PreparedDataset.open(spec.dataset_dir, "train").batch(
        0, hyper.batch_size, hyper.num_microbatches, hyper.seed
    )
    shapes = [tuple(microbatch.input_ids.shape) for microbatch in batch]
    monkeypatch.setattr(PreparedDataset, "largest_shapes", lambda *_: shapes)
    partition = make_partition(spec)
    need = device_need_of_job(make_context(spec, partition.layout, ""), partition)
    found = Found(monkeypatch)
    outcome = run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert outcome["status"] == "succeeded", outcome
    assert found.buffers == {"params": need.params_nbytes, "gradients": need.grads_nbytes}
    assert found.states_nbytes == need.states_nbytes
    added_nbytes = LOSSES_NBYTES
    if hyper.precision is not Precision.FP32 and (hyper.num_microbatches > 1 or is_sliced):
        # A CPU converts gradients before it adds them to sums, during the operation. The need counts it as a constant.
        added_nbytes += max(block.numel for block in partition.layout.blocks) * torch.float32.itemsize
    assert need.settled_activations_nbytes <= found.activations_nbytes <= need.activations.nbytes + added_nbytes
    assert (need.settled_nbytes == need.nbytes) == (name != "all swapped")


def budgeted(tmp_path: Path, **changes: Any) -> JobSpec:
    return make_spec(tmp_path, total_steps=1, evaluate_every=None, num_validation_examples=0, **changes)


def test_a_job_may_take_what_it_needs_and_not_a_byte_less(tmp_path: Path) -> None:
    spec = budgeted(tmp_path)
    partition = make_partition(spec)
    nbytes = device_need_of_job(make_context(spec, partition.layout, ""), partition).settled_nbytes
    too_small = replace(spec, device_memory_nbytes=nbytes - 1)
    refusal = f"needs {bytes_text(nbytes)} of device memory \\(.*\\), 1 bytes more than its budget of"
    with pytest.raises(PlanError, match=refusal):
        run_local(too_small, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    enough = replace(spec, device_memory_nbytes=nbytes)
    outcome = run_local(enough, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert outcome["status"] == "succeeded", outcome


def test_memory_in_the_plan_is_not_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_room, "device_need_of_job", None)
    spec = budgeted(tmp_path, device_memory_nbytes=1 << 20, planned_device_nbytes=1 << 20)
    partition = make_partition(spec)
    context = make_context(spec, partition.layout, "")
    require_device_room(context, partition)
    more = replace(context, spec=replace(spec, planned_device_nbytes=3 << 20))
    with pytest.raises(PlanError, match=r"another budget\), 2.00 MiB more than its budget of .*; set gpu_memory_gib"):
        require_device_room(more, partition)


def test_a_gpus_budget_also_covers_the_reserve_of_its_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = budgeted(tmp_path)
    partition = make_partition(spec)
    context = make_context(spec, partition.layout, "")
    need = device_need_of_job(context, partition)
    monkeypatch.setattr(device_room, "device_need_of_job", lambda *_, **__: need)

    def require(limit_nbytes: int, *, planned_nbytes: int | None, device: str) -> None:
        changed = replace(spec, device_memory_nbytes=limit_nbytes, planned_device_nbytes=planned_nbytes)
        require_device_room(replace(context, spec=changed), partition, device=device)

    for planned_nbytes in (None, need.nbytes):
        require(need.reserved_nbytes, planned_nbytes=planned_nbytes, device="cuda")
        require(need.nbytes, planned_nbytes=planned_nbytes, device="cpu")
    too_little = need.reserved_nbytes - 1
    with pytest.raises(PlanError, match=r"by its plan, with the reserve of PyTorch's allocator\), 1 bytes more than"):
        require(too_little, planned_nbytes=need.nbytes, device="cuda")
    with pytest.raises(PlanError, match=r"and the reserve of PyTorch's allocator .*\), 1 bytes more than its budget"):
        require(too_little, planned_nbytes=None, device="cuda")


def test_a_gpu_that_is_smaller_than_the_budget_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = budgeted(tmp_path, device_memory_nbytes=80 * GIB)
    partition = make_partition(spec)
    context = make_context(spec, partition.layout, "")
    need = device_need_of_job(context, partition)
    large = replace(need, activations=need.activations._replace(operation_nbytes=30 * GIB))
    monkeypatch.setattr(device_room, "device_need_of_job", lambda *_, **__: large)

    def require(gpu_nbytes: int, **changes: Any) -> None:
        changed = replace(context, spec=replace(spec, **changes))
        require_device_room(changed, partition, device="cuda", gpu_nbytes=gpu_nbytes)

    too_small = (
        r"more than its GPU has: 24.00 GiB, which its budget of 80.00 GiB exceeds; set gpu_memory_gib to at most 24"
    )
    with pytest.raises(PlanError, match=too_small):
        require(24 * GIB)
    with pytest.raises(PlanError, match=rf"by its plan, made for another GPU.*{too_small}"):
        require(24 * GIB, planned_device_nbytes=large.nbytes)
    with pytest.raises(PlanError, match=r"more than its GPU has: 24.00 GiB; set gpu_memory_gib to at most 24"):
        require(24 * GIB, planned_device_nbytes=large.nbytes, device_memory_nbytes=None)
    require(48 * GIB)
    require(48 * GIB, planned_device_nbytes=large.nbytes)
    require(24 * GIB, device_memory_nbytes=None)  # not counted
    with pytest.raises(PlanError, match=r"more than its budget of 20.00 GiB; set gpu_memory_gib, in the job's budgets"):
        require(24 * GIB, device_memory_nbytes=20 * GIB)


def test_a_worker_asks_for_the_memory_of_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def nbytes(device: torch.device) -> int:
        asked.append(device)
        return 1 << 10

    monkeypatch.setattr(worker, "gpu_memory_nbytes", nbytes)
    spec = budgeted(tmp_path, device_memory_nbytes=6 * GIB)
    with pytest.raises(PlanError, match=r"more than its GPU has: 1.00 KiB, which its budget of 6.00 GiB exceeds"):
        run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert asked == [torch.device("cpu")]


def test_job_that_cannot_be_counted_is_reported_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise DeviceNeedUnknownError("experts")

    monkeypatch.setattr(device_room, "device_need_of_job", refuse)
    spec = budgeted(tmp_path, device_memory_nbytes=1 << 30)
    outcome = run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert outcome["status"] == "succeeded", outcome
    told = [record.message for record in journal_of(spec)]
    assert any("budget of device memory could not be checked: experts" in line for line in told)


@pytest.mark.parametrize(("limit_gib", "fraction"), [(6, 0.25), (48, 1.0)])
def test_a_gpus_allocator_is_held_to_the_budget(
    monkeypatch: pytest.MonkeyPatch, limit_gib: int, fraction: float
) -> None:
    properties = SimpleNamespace(total_memory=24 * GIB)
    held: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *each: held.append(each))
    limit_device_memory(torch.device("cpu"), limit_gib * GIB)
    assert held == []
    limit_device_memory(torch.device("cuda", 0), limit_gib * GIB)
    assert held == [(fraction, torch.device("cuda", 0))]


def test_a_job_on_a_gpu_without_a_number_starts_with_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's function for the limit refuses a device without a number."""
    limited: list[tuple[float, int]] = []

    def limit(fraction: float, device: torch.device) -> None:
        limited.append((fraction, torch.cuda.memory._get_device_index(device)))

    with pytest.raises(ValueError, match="specified index"):
        limit(0.5, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=24 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(worker, "Device", lambda _, **options: Device(torch.device("cpu"), **options))
    spec = budgeted(tmp_path, device_memory_nbytes=6 * GIB)
    outcome = run_local(spec, partition=make_partition(spec), device="cuda", direct=has_direct_io(tmp_path))
    assert outcome["status"] == "succeeded", outcome
    assert limited == [(0.25, 1)]


@pytest.mark.parametrize(("batch_size", "num_microbatches"), [(4, 2), (12, 3), (30, 1)])
def test_shapes_of_an_evaluation(tmp_path: Path, batch_size: int, num_microbatches: int) -> None:
    spec = make_spec(tmp_path, batch_size=batch_size, num_microbatches=num_microbatches)
    largest = max(evaluation_groups(spec), key=len)
    shapes = evaluation_shapes(spec)
    assert [num_examples for num_examples, _ in shapes] == [len(microbatch.input_ids) for microbatch in largest]
    assert all(tokens >= each.input_ids.shape[1] for (_, tokens), each in zip(shapes, largest, strict=True))


def test_box_needs_memory_for_its_own_blocks_and_for_groups_in_flight(tmp_path: Path) -> None:
    spec = make_spec(tmp_path / "job", num_microbatches=4, placement=Placement(group_size=1))
    partition = make_partition(spec)
    stages = (Stage(0, 3), Stage(3, 5))
    boxes = [replace(spec, stages=stages, box=box) for box in range(2)]
    whole, first, second = (
        device_need_of_job(make_context(each, partition.layout, ""), partition) for each in (spec, *boxes)
    )
    hidden_nbytes = 48 * 64 * 4  # of a micro-batch with one example
    assert whole.waiting_nbytes == 0
    assert second.waiting_nbytes == 2 * hidden_nbytes
    assert first.waiting_nbytes >= (2 + 2) * hidden_nbytes  # also two blocks' inputs of a second group
    for box in (first, second):
        assert box.params_nbytes < whole.params_nbytes
        assert box.grads_nbytes < whole.grads_nbytes
        assert box.activations.nbytes <= whole.activations.nbytes


@pytest.mark.usefixtures("unchecked_activations")
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": Precision.BF16, "lanes": 2},
        pytest.param(
            {"precision": Precision.BF16, "placement": Placement(device_blocks=(0, 3))}, marks=pytest.mark.long
        ),
        pytest.param(
            {"precision": Precision.BF16, "ranks": (1, 2), "placement": Placement(group_size=2)}, marks=pytest.mark.long
        ),
    ],
    ids=["lanes", "states on the device", "two GPU workers with the head"],
)
def test_boxes_of_a_tied_model_allocate_the_computed_device_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    options = {"total_steps": 1, "evaluate_every": None, "num_validation_examples": 0, "num_microbatches": 4}
    ranks = changes.pop("ranks", (1, 1))
    spec = make_spec(tmp_path / "job", tied=True, **options, **changes)
    first, *others = boxes_of(spec, (Stage(0, 2), Stage(2, 5)), ranks)
    partition = make_partition(spec)
    needs = [
        device_need_of_job(make_context(each, partition.layout, ""), partition)
        for each in (first, *others)
        for _ in range(each.num_ranks)
    ]
    found = Found(monkeypatch)
    outcome = run_local(first, other_boxes=others, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert outcome["status"] == "succeeded", outcome
    assert found.buffers == {
        "params": sum(need.params_nbytes for need in needs),
        "gradients": sum(need.grads_nbytes for need in needs),
    }
