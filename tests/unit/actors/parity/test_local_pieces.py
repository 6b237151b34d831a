"""Whole jobs with layers whose params are streamed to the device in pieces: the same bits as with whole layers."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actors.specs import make_layout
from tests.support.actors.specs import make_spec as make_plain_spec
from tests.support.reference_loop import train_plainly
from tests.support.training import has_direct_io, leftovers_of, make_partition, make_spec, metrics_of
from tests.unit.actors.parity.test_local_groups import Run
from tests.unit.actors.parity.test_local_parity import assert_params_agree
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.job.context import make_context, piece_bounds
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import Message, SpanKind, SpansReported
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.worker_policy.block_queue import Ordering
from windlass.engine.device.buffer_pool import BufferClass, DeviceBuffers
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import Placement, PlanError
from windlass.engine.memory_plan.queue_depths import FETCH_DEPTH
from windlass.engine.model.layout import BlockLayout, ParamSlice, UnsupportedArchitectureError
from windlass.engine.model.streamed_params import PieceBuffers
from windlass.storage.ids import ActorName, BlockIndex, Precision

pytestmark = pytest.mark.usefixtures("small_activation_slots")

LAYERS = (1, 2, 3)
INPUT, SWAP = ActivationChoice.RECOMPUTE_SWAP_INPUT, ActivationChoice.SWAP
JOBS: dict[str, dict[str, Any]] = {
    "from the SSDs": {"placement": Placement(num_cached_params=0)},
    "some params stay": {"precision": Precision.BF16, "placement": Placement(num_cached_params=7)},
    "graphs are kept": {
        "num_microbatches": 4,
        "clip_norm": 0.5,
        "dropout": 0.1,
        "placement": Placement(activations=ActivationChoice.KEEP.of_layers(3)),
    },
    "groups": {
        "precision": Precision.BF16,
        "num_microbatches": 4,
        "tied": True,
        "placement": Placement(
            group_size=3,
            host_blocks=(1,),
            commit_every=2,
            activations=(*SWAP.of_layers(1), *INPUT.of_layers(1), *SWAP.of_layers(1)),
            host_activation_nbytes=4 << 20,
        ),
    },
}

QUICK = ("some params stay", "groups")


def spec_of(root: Path, streamed: tuple[int, ...], *, placement: Placement | None = None, **changes: Any) -> JobSpec:
    placement = replace(placement or Placement(), streamed_blocks=streamed)
    return make_spec(root, placement=placement, **({"total_steps": 4, "evaluate_every": 2} | changes))


def train(spec: JobSpec, **options: Any) -> Run:
    direct = has_direct_io(Path(spec.model_dir))
    outcome = run_local(spec, partition=make_partition(spec), poison_released=True, direct=direct, **options)
    assert outcome["status"] == "succeeded", outcome
    assert leftovers_of(spec) == []
    return Run.of(spec)


@pytest.mark.short("some params stay")
@pytest.mark.usefixtures("unchecked_activations")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in JOBS]
)
def test_job_with_streamed_layers_gives_bits_of_whole_layers(tmp_path: Path, name: str) -> None:
    whole = train(spec_of(tmp_path / "whole", (), **JOBS[name]))
    train(spec_of(tmp_path / "pieces", LAYERS, **JOBS[name])).assert_equals(whole)
    job = JOBS[name] | {"placement": replace(JOBS[name]["placement"], streams_grads=True)}
    train(spec_of(tmp_path / "grads", LAYERS, **job)).assert_equals(whole)


@pytest.mark.long
@pytest.mark.usefixtures("unchecked_activations")
def test_streamed_gradients_that_spill_give_bits_of_whole_ones(tmp_path: Path) -> None:
    """Groups of one, one of which is not full, one layer whose gradient is not streamed, and little host memory."""
    job = {"precision": Precision.BF16, "num_microbatches": 3, "clip_norm": 0.5, "total_steps": 3}
    placement = Placement(num_host_grad_blocks=2, num_cached_params=0)
    whole = train(spec_of(tmp_path / "whole", (), placement=placement, **job))
    placement = replace(placement, group_size=1, streams_grads=True, num_grad_buffers=1)
    train(spec_of(tmp_path / "grads", (2, 3), placement=placement, **job)).assert_equals(whole)


def test_gradients_are_streamed_only_with_one_lane_and_one_gpu(tmp_path: Path) -> None:
    placement = Placement(streams_grads=True)
    spec = make_plain_spec(placement=placement, num_microbatches=2, batch_size=2, lanes=2)
    with pytest.raises(PlanError, match=r"2 lanes and 1 GPUs: .* leave it out"):
        make_context(spec, make_layout(2048, 3 * 2048, 2048), "/arena")


def test_job_with_streamed_layers_agrees_with_plain_pytorch(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LAYERS, total_steps=6, evaluate_every=3)
    found, plain = train(spec), train_plainly(spec)
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    assert metrics_of(spec, "valid_loss") == pytest.approx(plain.validation_losses, rel=1e-5)
    assert_params_agree(found.params, plain.params, Precision.FP32)


@pytest.mark.long
@pytest.mark.usefixtures("unchecked_activations")
def test_host_memory_for_one_layer_is_enough(tmp_path: Path) -> None:
    """Regardless of the number of operations in flight."""
    options: dict[str, Any] = {"placement": Placement(num_cached_params=0), "ordering": Ordering(max_prefetched=5)}
    spec, budget = spec_of(tmp_path / "pieces", LAYERS, **options), 1 << 40
    layout = make_partition(spec).layout
    with contextlib.suppress(PlanError):
        while True:
            plan = make_context(replace(spec, host_memory_nbytes=budget), layout, "/arena").plan
            budget = plan.arena_nbytes - 1
    assert plan.params.num_slots == FETCH_DEPTH + layout.num_chunks(BlockIndex(1))
    found = train(replace(spec, host_memory_nbytes=plan.arena_nbytes))
    found.assert_equals(train(spec_of(tmp_path / "whole", (), **options)))


@pytest.mark.usefixtures("unchecked_activations")
def test_the_device_has_no_buffer_for_a_whole_layer_and_everything_comes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: dict[str, dict[BufferClass, int]] = {}
    pieces: list[tuple[int, int]] = []
    make_buffers, make_pieces = DeviceBuffers.__init__, PieceBuffers.__init__

    def note_buffers(self: Any, device: Any, classes: Any, *, name: str) -> None:
        planned[name] = dict(classes)
        make_buffers(self, device, classes, name=name)

    def note_pieces(self: Any, device: Any, numel: int, dtype: torch.dtype, num_buffers: int) -> None:
        pieces.append((numel, num_buffers))
        make_pieces(self, device, numel, dtype, num_buffers)

    monkeypatch.setattr(DeviceBuffers, "__init__", note_buffers)
    monkeypatch.setattr(PieceBuffers, "__init__", note_pieces)
    nbytes = dict.fromkeys(LAYERS, 0)

    def look(_: ActorName, message: Message) -> None:
        if isinstance(message, SpansReported):
            for span in message.spans:
                if span.kind is SpanKind.COPY_PARAMS_IN and span.block in nbytes:
                    nbytes[span.block] += span.nbytes

    spec = spec_of(tmp_path, LAYERS, total_steps=1, evaluate_every=None, num_validation_examples=0)
    train(spec, on_message=look)
    embedding, layer, *_, head = make_partition(spec).layout.blocks
    small = layer.numel - layer.decay_numel
    assert planned["params"] == {
        (numel, torch.float32): number for numel, number in ((embedding.numel, 1), (small, 2), (head.numel, 1))
    }
    assert pieces == [(64 * 128, 2)]  # a matrix of the MLP; a layer has three, and as much again for attention
    # Streamed for the forward pass, the recomputation and the backward pass. Released buffers are filled with NaN, so
    # no pass can reuse an earlier transfer.
    assert all(nbytes[block] > 2 * 4 * layer.numel for block in LAYERS)


def test_a_tiny_model_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[Any, ...]] = []

    def check(_: Any, *ways: Any) -> None:
        checked.append(ways)
        raise UnsupportedArchitectureError("not in pieces")

    monkeypatch.setattr(gpu_worker, "check_architecture", check)
    activations = SWAP.of_layers(3)
    placement = Placement(activations=activations, host_activation_nbytes=4 << 20)
    spec = spec_of(tmp_path, (2,), placement=placement)
    with pytest.raises(UnsupportedArchitectureError, match="not in pieces"):
        run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert checked == [(set(activations), True)]


def test_a_module_with_more_matrices_than_there_are_buffers_is_refused() -> None:
    params = [
        ParamSlice(name=f"layers.0.experts.{name}", shape=(2048,), offset=2048 * i, numel=2048, decay=True)
        for i, name in enumerate(("up", "gate", "down"))
    ]
    layout = make_layout(2048, 3 * 2048, 2048)
    blocks = (layout.blocks[0], BlockLayout(BlockIndex(1), "layers.0", tuple(params)), layout.blocks[2])
    context = make_context(
        make_plain_spec(placement=Placement(streamed_blocks=(1,))), replace(layout, blocks=blocks), "/arena"
    )
    with pytest.raises(PlanError, match=r"block 1 cannot be streamed: .* in 3 pieces .* there are 2 buffers; leave"):
        piece_bounds(context)
