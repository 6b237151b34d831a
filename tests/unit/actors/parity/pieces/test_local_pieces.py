"""Whole jobs with layers whose params are streamed to the device in pieces: the same bits as with whole layers."""

import contextlib
import random
import time
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actors.specs import make_layout
from tests.support.actors.specs import make_spec as make_plain_spec
from tests.support.actors.whole_jobs import Run
from tests.support.cut_off import CutOff
from tests.support.reference_loop import train_plainly
from tests.support.training import has_direct_io, leftovers_of, make_partition, make_spec, metrics_of
from tests.unit.actors.parity.test_local_parity import assert_params_agree
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.gpu_worker.grad_accumulation import PartialGrads
from windlass.actors.job.context import make_context, piece_bounds
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import ComputeBlock, Message, SpanKind, SpansReported, UpdateStep
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.worker_policy.block_queue import Ordering
from windlass.actors.worker_policy.grad_sums import Use
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.device.buffer_pool import BufferClass, DeviceBuffers
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.arena import layout as arena_layout
from windlass.engine.memory_plan.plan import ModelSize, Placement, PlanError
from windlass.engine.memory_plan.queue_depths import FETCH_DEPTH
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.model.layout import BlockLayout, ParamSlice, UnsupportedArchitectureError
from windlass.engine.model.streaming.params import PieceBuffers
from windlass.storage.ids import ActorName, Attempt, BlockIndex, Precision

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


def test_gradients_are_streamed_only_in_groups_of_whole_lanes() -> None:
    placement = Placement(streamed_blocks=(1,), streams_grads=True, group_size=1)
    spec = make_plain_spec(placement=placement, num_microbatches=4, batch_size=4, lanes=2)
    with pytest.raises(PlanError, match=r"groups of 1 of 4 micro-batches end inside of the 2 lanes: .* group_size=2"):
        make_context(spec, make_layout(2048, 3 * 2048, 2048), "/arena")


# Lanes, GPUs, and micro-batches of a group. The fifth step, the last of an epoch, has two micro-batches of four: some
# lanes lack their last micro-batches or all.
SEVERAL = [(2, 1, 4), (2, 2, 2), (4, 2, 2), (4, 4, 1), (3, 1, 2), (1, 2, 2), (1, 2, 1), (1, 3, 1), (2, 3, 2), (4, 3, 1)]
QUICK_SEVERAL = [
    (Precision.BF16, 0.5, True, 2, 1, 4),
    (Precision.FP16, 0.5, False, 4, 2, 2),
    (Precision.FP32, None, True, 1, 3, 1),
    (Precision.BF16, None, False, 2, 2, 2),
]
ALL_SEVERAL = [(*case, *several) for case in product(Precision, (None, 0.5), (False, True)) for several in SEVERAL]


@pytest.mark.short("bf16-None-False-2-2-2")
@pytest.mark.usefixtures("unchecked_activations")
@pytest.mark.parametrize(
    ("precision", "clip_norm", "tied", "lanes", "num_ranks", "group_size"),
    [
        pytest.param(*case, marks=pytest.mark.long, id="-".join(map(str, case)))
        for case in [*QUICK_SEVERAL, *random.Random(1).sample([c for c in ALL_SEVERAL if c not in QUICK_SEVERAL], 30)]
    ],
)
def test_gradients_in_pieces_of_several_lanes_and_gpus_have_the_bits_of_whole_ones(
    tmp_path: Path,
    precision: Precision,
    clip_norm: float | None,
    tied: bool,
    lanes: int,
    num_ranks: int,
    group_size: int,
) -> None:
    job: dict[str, Any] = {
        "precision": precision,
        "clip_norm": clip_norm,
        "tied": tied,
        "lanes": lanes,
        "num_microbatches": 4,
        "total_steps": 6,
        "evaluate_every": 3,
        "placement": Placement(num_cached_params=0, group_size=group_size),
    }
    whole = train(spec_of(tmp_path / "whole", (), **job))
    job["placement"] = replace(job["placement"], streams_grads=True, num_grad_buffers=1)
    streamed = LAYERS if clip_norm else LAYERS[1:]
    train(replace(spec_of(tmp_path / "grads", streamed, **job), num_ranks=num_ranks)).assert_equals(whole)


@pytest.mark.long
@pytest.mark.usefixtures("unchecked_activations")
def test_late_messages_and_spilled_gradients_change_no_bit(tmp_path: Path) -> None:
    """The GPU workers pass sums in pieces at once, through few slots, and gradients wait for commits."""
    job: dict[str, Any] = {"precision": Precision.BF16, "clip_norm": 0.5, "num_microbatches": 4, "lanes": 4}
    placement = Placement(num_host_grad_blocks=2, num_cached_params=0)
    whole = train(spec_of(tmp_path / "whole", (), placement=placement, **job))
    choose = random.Random(7)

    def delay(to: ActorName, message: Message) -> None:
        if choose.random() < 0.1:
            time.sleep(choose.random() * 0.01)

    spec = spec_of(tmp_path / "grads", LAYERS, placement=replace(placement, streams_grads=True), **job)
    train(replace(spec, num_ranks=4), on_message=delay).assert_equals(whole)


@pytest.mark.long
@pytest.mark.usefixtures("unchecked_activations")
@pytest.mark.parametrize(("lanes", "num_ranks"), [(4, 2), (2, 2), (4, 4), (1, 2)])
def test_an_overflow_in_one_micro_batch_skips_the_step_for_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: int, num_ranks: int
) -> None:
    cross_entropy, broken, found = torch.nn.functional.cross_entropy, set[int](), []

    def break_some(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        loss = cross_entropy(logits, targets, **options)
        return loss * float("inf") if int(targets.clamp(min=0).sum()) in broken else loss

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", break_some)
    job: dict[str, Any] = {"precision": Precision.FP16, "clip_norm": 0.5, "num_microbatches": 4, "lanes": lanes}
    for streamed, placement in (((), Placement()), (LAYERS, Placement(streams_grads=True))):
        spec = spec_of(tmp_path / f"{len(streamed)}", streamed, placement=placement, **job)
        hyper, dataset = spec.training, PreparedDataset.open(spec.dataset_dir, "train")
        batch = dataset.batch(2, hyper.batch_size, hyper.num_microbatches, hyper.seed)
        broken.add(int(batch[1].targets.clamp(min=0).sum()))  # of the first GPU worker, not the last
        run = train(replace(spec, num_ranks=num_ranks if streamed else 1))
        assert [step for step, norm in metrics_of(spec, "grad_norm").items() if norm is None] == [3]
        found.append((metrics_of(spec, "loss_scale"), run))
    (scales, whole), (others, in_pieces) = found
    assert scales == others
    in_pieces.assert_equals(whole)


def copied_out(spec: JobSpec) -> dict[SpanKind, int]:
    """Trains, and returns the bytes of streamed gradients that were copied out in the first step, by kind."""
    nbytes = Counter[SpanKind]()

    def look(_: ActorName, message: Message) -> None:
        for span in message.spans if isinstance(message, SpansReported) else ():
            if span.step == 1 and span.block in LAYERS:
                nbytes[span.kind] += span.nbytes

    train(spec, on_message=look)
    return {kind: nbytes[kind] for kind in (SpanKind.COPY_GRAD_OUT, SpanKind.COPY_PARTIAL_OUT)}


@pytest.mark.usefixtures("unchecked_activations")
def test_sums_of_lanes_are_noted_as_partial_in_the_last_group_too(tmp_path: Path) -> None:
    """The first lane's sums, after both micro-batches, and the second one's total are the gradient."""
    job: dict[str, Any] = {"num_microbatches": 4, "lanes": 2, "total_steps": 1, "evaluate_every": None}
    spec = spec_of(tmp_path, LAYERS, placement=Placement(streams_grads=True, group_size=4), **job)
    nbytes = sum(4 * make_partition(spec).layout.blocks[layer].numel for layer in LAYERS)
    assert copied_out(spec) == {SpanKind.COPY_GRAD_OUT: 3 * nbytes, SpanKind.COPY_PARTIAL_OUT: nbytes}


@pytest.mark.usefixtures("unchecked_activations")
@pytest.mark.parametrize("streamed", [LAYERS, pytest.param((1, 2), marks=pytest.mark.long)])
def test_sums_get_slots_in_the_order_of_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: tuple[int, ...]
) -> None:
    """With slots for the largest operation only, and sums of whole blocks that ask late for theirs."""
    copy_out = PartialGrads.copy_out

    def copy_out_late(self: PartialGrads, operation: ComputeBlock, use: Use, grad: GradBuffer) -> None:
        if use[1] != len(LAYERS) + 1:  # after the head's own sum
            time.sleep(0.05)
        copy_out(self, operation, use, grad)

    def fewest_slots(model: ModelSize, _: Placement, num_groups: int, *__: object) -> int:
        head = model.num_chunks(model.blocks[-1]) + model.num_chunks(model.blocks[0])
        return (num_groups - 1) * max(head, *map(model.num_chunks, model.blocks))

    monkeypatch.setattr(PartialGrads, "copy_out", copy_out_late)
    monkeypatch.setattr(arena_layout, "num_partial_grads", fewest_slots)
    job: dict[str, Any] = {"precision": Precision.BF16, "tied": True, "num_microbatches": 2, "lanes": 2}
    placement = Placement(num_cached_params=0, streams_grads=True)
    spec = spec_of(tmp_path, streamed, placement=placement, total_steps=2, evaluate_every=None, **job)
    train(replace(spec, num_ranks=2))


@pytest.mark.usefixtures("unchecked_activations")
def test_an_attempt_goes_on_with_gradients_in_pieces_on_several_gpus(tmp_path: Path) -> None:
    """It began with whole gradients, and ends with pieces on another number of GPUs."""
    job: dict[str, Any] = {"precision": Precision.BF16, "clip_norm": 0.5, "num_microbatches": 4, "lanes": 2}
    job |= {"total_steps": 3, "evaluate_every": None}
    whole = train(spec_of(tmp_path / "whole", (), **job))
    spec, pieces = spec_of(tmp_path / "cut", (), **job), Placement(streamed_blocks=LAYERS, streams_grads=True)

    def cut(to: ActorName, message: Message) -> None:
        if isinstance(message, UpdateStep) and message.step == 2:
            raise CutOff

    with pytest.raises(CutOff):
        train(spec, on_message=cut)
    train(replace(spec, attempt=Attempt(2), placement=pieces, num_ranks=2)).assert_equals(whole)


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


@pytest.fixture(name="planned")
def planned_buffers(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[BufferClass, int]]:
    """The numbers of a job's buffers on the device, by their purpose, once it has run."""
    planned: dict[str, dict[BufferClass, int]] = {}
    make_buffers = DeviceBuffers.__init__

    def note_buffers(self: Any, device: Any, classes: Any, *, name: str) -> None:
        planned[name] = dict(classes)
        make_buffers(self, device, classes, name=name)

    monkeypatch.setattr(DeviceBuffers, "__init__", note_buffers)
    return planned


@pytest.mark.usefixtures("unchecked_activations")
def test_the_device_has_no_buffer_for_a_whole_layer_and_everything_comes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: dict[str, dict[BufferClass, int]]
) -> None:
    pieces: list[tuple[int, int]] = []
    make_pieces = PieceBuffers.__init__

    def note_pieces(self: Any, device: Any, numel: int, dtype: torch.dtype, num_buffers: int) -> None:
        pieces.append((numel, num_buffers))
        make_pieces(self, device, numel, dtype, num_buffers)

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


@pytest.mark.usefixtures("unchecked_activations")
def test_embedding_and_head_take_turns_in_one_buffer_beside_gradients_in_pieces(
    tmp_path: Path, planned: dict[str, dict[BufferClass, int]]
) -> None:
    copied: Counter[tuple[int, int]] = Counter()

    def look(_: ActorName, message: Message) -> None:
        if isinstance(message, SpansReported):
            for span in message.spans:
                if span.kind is SpanKind.COPY_PARAMS_IN:
                    copied[span.block, span.step] += span.nbytes

    placement = Placement(streams_grads=True, num_cached_params=0)
    spec = spec_of(tmp_path, LAYERS, placement=placement, total_steps=2, evaluate_every=None, num_validation_examples=0)
    train(spec, on_message=look)
    embedding, layer, *_, head = make_partition(spec).layout.blocks
    assert head.numel != embedding.numel
    small = layer.numel - layer.decay_numel
    ends = max(embedding.numel, head.numel)
    assert planned["params"] == {(ends, torch.float32): 1, (small, torch.float32): 2}
    for step in (0, 1):  # the one whose update they follow from
        assert copied[0, step] == 2 * 4 * embedding.numel  # again for its backward pass, after the head
        assert copied[len(LAYERS) + 1, step] == 4 * head.numel


@pytest.mark.parametrize(
    ("changes", "placed", "shares"),
    [
        ({}, {}, True),
        ({}, {"group_size": 1}, True),
        ({}, {"streams_grads": False}, False),
        ({"tied": True}, {}, False),  # the head's operation needs both
        ({}, {"streamed_blocks": (), "streams_grads": False}, False),
    ],
)
def test_embedding_and_head_share_a_buffer_only_where_they_take_turns(
    tmp_path: Path, changes: dict[str, Any], placed: dict[str, Any], shares: bool
) -> None:
    placement = replace(Placement(streamed_blocks=LAYERS, streams_grads=True), **placed)
    spec = make_spec(tmp_path, placement=placement, num_microbatches=2, **changes)
    assert make_context(spec, make_partition(spec).layout, "/arena").plan.ends_share_params is shares


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
    assert checked == [(set(activations), True, False, False)]


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
