"""Whole jobs whose embedding and head are streamed to the device in pieces: the same bits as with whole ones."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actors.whole_jobs import Run
from tests.support.cut_off import cut_off_at_gradient, run_attempt
from tests.support.training import has_direct_io, make_partition
from tests.unit.actors.parity.pieces.test_local_pieces import LAYERS, planned_buffers, spec_of, train
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import Message, SpanKind, SpansReported, UpdateStep
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.device.buffer_pool import BufferClass
from windlass.engine.memory_plan.activation_policy import RECOMPUTE_ALL, ActivationChoice
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.model.gradient_check import check_architecture
from windlass.engine.model.layout import UnsupportedArchitectureError
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import ActorName, HeadSlices, Precision

pytestmark = pytest.mark.usefixtures("small_activation_slots", "unchecked_activations")

HEAD = len(LAYERS) + 1
planned = planned_buffers  # a fixture
# Embedding and head have 8192 elements each, as the largest matrix of a layer. Parts have at most 1536.
CUT = 1800
# An example has 8 to 48 tokens.
_SLICE_TOKENS = 16


@pytest.fixture
def sliced_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head goes over each micro-batch in several slices."""
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", _SLICE_TOKENS)
    monkeypatch.setattr(slice_sizes, "MAX_LOGITS_NUMEL", 0)  # small slices have 64 tokens at least


JOBS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"precision": Precision.BF16},
    "clipped in fp16": {"precision": Precision.FP16, "clip_norm": 0.5},
    "summed in 16 bits": {
        "precision": Precision.BF16,
        "num_microbatches": 2,
        "accumulation_precision": Precision.BF16,
    },
    "groups": {
        "precision": Precision.BF16,
        "num_microbatches": 4,
        "clip_norm": 0.5,
        "dropout": 0.1,
        "placement": Placement(group_size=3, activations=ActivationChoice.KEEP.of_layers(3)),
    },
    "spilled gradients": {
        "num_microbatches": 3,
        "clip_norm": 0.5,
        "total_steps": 3,
        "placement": Placement(num_host_grad_blocks=0, num_cached_params=0, group_size=1),
    },
    "states in memory": {
        "num_microbatches": 2,
        "placement": Placement(host_blocks=(0, 2, 4), device_blocks=(1,), commit_every=2),
    },
    "the head rests on the device": {
        "num_microbatches": 2,
        "placement": Placement(device_blocks=(4,), commit_every=2),
    },
}
QUICK = (("groups", CUT), ("clipped in fp16", None))
CASES = list(product(JOBS, (None, CUT)))


def trained_in_both_ways(
    root: Path, *, num_ranks: int = 1, streams_grads: Sequence[bool] = (True, False), **job: Any
) -> None:
    """Trains a job with whole blocks on one GPU, and in pieces on some, and compares the results to the bit."""
    whole = train(spec_of(root / "whole", (), **job))
    placement = replace(job.get("placement", Placement()), streams_ends=True)
    layers = tuple(layer for layer in LAYERS if layer not in placement.device_blocks)
    for also_grads in streams_grads:
        job["placement"] = replace(placement, streams_grads=also_grads, num_grad_buffers=1)
        spec = spec_of(root / f"ends-{also_grads}", layers, **job)
        train(replace(spec, num_ranks=num_ranks)).assert_equals(whole)


@pytest.mark.short("groups-1800")
@pytest.mark.parametrize(
    ("name", "cut_matrices"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.long]) for case in CASES],
)
def test_embedding_and_head_in_pieces_give_bits_of_whole_ones(
    tmp_path: Path, name: str, cut_matrices: int | None
) -> None:
    trained_in_both_ways(tmp_path, cut_matrices=cut_matrices, **({"placement": Placement()} | JOBS[name]))


@pytest.mark.usefixtures("sliced_head")
@pytest.mark.parametrize("cut_matrices", [CUT, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("head_slices", [HeadSlices.LARGE, pytest.param(HeadSlices.SMALL, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("precision", "num_microbatches"), [(Precision.FP32, 1), pytest.param(Precision.BF16, 4, marks=pytest.mark.long)]
)
def test_sums_over_slices_of_the_head_go_out_and_come_back(
    tmp_path: Path, cut_matrices: int | None, head_slices: HeadSlices, precision: Precision, num_microbatches: int
) -> None:
    trained_in_both_ways(
        tmp_path,
        cut_matrices=cut_matrices,
        precision=precision,
        num_microbatches=num_microbatches,
        batch_size=4 * num_microbatches,
        clip_norm=0.5,
        head_slices=head_slices,
        total_steps=3,
        evaluate_every=None,
    )


# Lanes, GPUs, and micro-batches of a group. The fifth step, the last of an epoch, has two micro-batches of four.
SEVERAL = [(2, 1, 4), (2, 2, 2), (4, 2, 2), (4, 4, 1), (3, 1, 2), (1, 2, 1), (1, 3, 1), (2, 3, 2), (4, 3, 1)]
QUICK_SEVERAL = [
    (Precision.BF16, 0.5, True, CUT, 4, 2, 2),
    (Precision.FP16, 0.5, False, CUT, 2, 2, 2),
    (Precision.FP32, None, True, None, 2, 1, 4),
    (Precision.BF16, None, True, CUT, 1, 3, 1),
]
ALL_SEVERAL = [
    (*case, *several) for case in product(Precision, (None, 0.5), (False, True), (None, CUT)) for several in SEVERAL
]


@pytest.mark.short("bf16-0.5-True-1800-4-2-2")
@pytest.mark.parametrize(
    ("precision", "clip_norm", "is_sliced", "cut_matrices", "lanes", "num_ranks", "group_size"),
    [
        pytest.param(*case, marks=pytest.mark.long, id="-".join(map(str, case)))
        for case in [*QUICK_SEVERAL, *random.Random(1).sample([c for c in ALL_SEVERAL if c not in QUICK_SEVERAL], 12)]
    ],
)
def test_embedding_and_head_of_several_lanes_and_gpus_have_the_bits_of_whole_ones(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    precision: Precision,
    clip_norm: float | None,
    is_sliced: bool,
    cut_matrices: int | None,
    lanes: int,
    num_ranks: int,
    group_size: int,
) -> None:
    if is_sliced:
        request.getfixturevalue("sliced_head")
    trained_in_both_ways(
        tmp_path,
        num_ranks=num_ranks,
        streams_grads=(True,),
        precision=precision,
        clip_norm=clip_norm,
        cut_matrices=cut_matrices,
        lanes=lanes,
        num_microbatches=4,
        total_steps=6,
        evaluate_every=3,
        placement=Placement(num_cached_params=0, group_size=group_size),
    )


# Jobs whose gradients leave in 16 bits, while the sum over slices of a micro-batch is in fp32.
ROUNDED: dict[str, dict[str, Any]] = {
    "states on the SSDs": {"precision": Precision.BF16, "placement": Placement(num_cached_params=0)},
    "clipped, states in memory": {
        "precision": Precision.FP16,
        "clip_norm": 0.5,
        "placement": Placement(host_blocks=(0, 1, 2, 3, 4), commit_every=2),
    },
    "clipped, spilled gradients": {
        "precision": Precision.BF16,
        "clip_norm": 0.5,
        "placement": Placement(num_host_grad_blocks=0, num_cached_params=0),
    },
    # The fifth step, the last of an epoch, has two micro-batches of four.
    "groups": {
        "precision": Precision.BF16,
        "num_microbatches": 4,
        "accumulation_precision": Precision.BF16,
        "clip_norm": 0.5,
        "placement": Placement(group_size=3),
    },
    "groups of three GPUs": {
        "precision": Precision.BF16,
        "num_microbatches": 4,
        "accumulation_precision": Precision.BF16,
        "num_ranks": 3,
        "placement": Placement(group_size=1),
    },
    "two GPUs that pass sums at once": {
        "precision": Precision.BF16,
        "num_microbatches": 4,
        "accumulation_precision": Precision.BF16,
        "num_ranks": 2,
        "placement": Placement(group_size=2),
    },
}
QUICK_ROUNDED = (("states on the SSDs", CUT), ("clipped, states in memory", None))


@pytest.mark.short("states on the SSDs-1800")
@pytest.mark.usefixtures("sliced_head")
@pytest.mark.parametrize(
    ("name", "cut_matrices"),
    [
        pytest.param(*case, marks=[] if case in QUICK_ROUNDED else [pytest.mark.long])
        for case in product(ROUNDED, (None, CUT))
    ],
)
def test_sums_over_slices_that_leave_in_16_bits_are_rounded_once(
    tmp_path: Path, name: str, cut_matrices: int | None
) -> None:
    steps = {"total_steps": 6 if "groups" in name or "GPUs" in name else 3, "evaluate_every": None}
    trained_in_both_ways(tmp_path, streams_grads=(True,), cut_matrices=cut_matrices, **steps | ROUNDED[name])


@pytest.mark.parametrize("num_microbatches", [1, pytest.param(2, marks=pytest.mark.long)])
def test_steps_of_one_slice_and_of_several_have_the_bits_of_whole_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_microbatches: int
) -> None:
    """A sum over one slice is in 16 bits: with several micro-batches it is rounded after each."""
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 24)
    job: dict[str, Any] = {
        "precision": Precision.BF16,
        "accumulation_precision": Precision.BF16,
        "evaluate_every": None,
    }
    job |= {"batch_size": num_microbatches, "num_microbatches": num_microbatches, "total_steps": 6}
    trained_in_both_ways(tmp_path, streams_grads=(True,), cut_matrices=CUT, **job)
    spec = spec_of(tmp_path / "facts", LAYERS, **job)
    dataset = PreparedDataset.open(spec.dataset_dir, "train")
    batches = [dataset.batch(step, num_microbatches, num_microbatches, spec.training.seed) for step in range(1, 7)]
    assert {batch[0].input_ids.numel() > 24 for batch in batches} == {False, True}


@pytest.mark.long
@pytest.mark.usefixtures("sliced_head")
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_attempts_with_sums_in_pieces_go_on_after_whole_ones_and_the_other_way_round(
    tmp_path: Path, precision: Precision
) -> None:
    job: dict[str, Any] = {"precision": precision, "clip_norm": 0.5, "total_steps": 6, "cut_matrices": CUT}
    whole = train(spec_of(tmp_path / "whole", (), **job))
    spec = spec_of(tmp_path / "cut", LAYERS, **job, placement=Placement(streams_grads=True, streams_ends=True))
    plain = replace(spec, placement=Placement())
    assert run_attempt(spec, 1, (UpdateStep, 2)) is None
    assert run_attempt(plain, 2, (UpdateStep, 3)) is None
    with cut_off_at_gradient(5, HEAD):
        assert run_attempt(spec, 3) is None
    assert run_attempt(spec, 4) is not None
    found = Run.of(spec)
    assert all(torch.equal(param, whole.params[name]) for name, param in found.params.items())
    assert found.losses[-1] == whole.losses[-1]


def copied_of_ends(spec: JobSpec) -> Counter[tuple[int, SpanKind]]:
    """Trains one step, and returns the bytes that were copied of embedding and head, by block and kind."""
    nbytes: Counter[tuple[int, SpanKind]] = Counter()

    def look(_: ActorName, message: Message) -> None:
        for span in message.spans if isinstance(message, SpansReported) else ():
            if span.block in (0, HEAD):
                nbytes[span.block, span.kind] += span.nbytes

    train(spec, on_message=look)
    return nbytes


@pytest.mark.usefixtures("sliced_head")
def test_the_device_has_buffers_for_pieces_and_the_smallest_rest_only(
    tmp_path: Path, planned: dict[str, dict[BufferClass, int]]
) -> None:
    placement = Placement(streams_grads=True, streams_ends=True, num_grad_buffers=1)
    job: dict[str, Any] = {"total_steps": 1, "evaluate_every": None, "num_validation_examples": 0, "batch_size": 1}
    spec = spec_of(tmp_path, LAYERS, placement=placement, **job)
    copied = copied_of_ends(spec)
    embedding, layer, *_, head = make_partition(spec).layout.blocks
    small, of_head = layer.numel - layer.decay_numel, head.numel - head.decay_numel
    sizes = {0: 1, small: 2, of_head: 1}  # number of buffers by their size
    assert planned == {"params": {(numel, torch.float32): number for numel, number in sizes.items()}, "gradients": {}}
    dataset = PreparedDataset.open(spec.dataset_dir, "train")
    ((_, num_tokens),) = dataset.largest_shapes(1, 1)
    num_slices = -(-dataset.batch(0, 1, 1, spec.training.seed)[0].input_ids.numel() // _SLICE_TOKENS)
    assert 1 < num_slices <= -(-num_tokens // _SLICE_TOKENS)
    # Forward and backward; released buffers are filled with NaN, so no pass finds params of the one before.
    assert copied[0, SpanKind.COPY_PARAMS_IN] == 2 * 4 * embedding.numel
    assert copied[HEAD, SpanKind.COPY_PARAMS_IN] == 4 * (of_head + 2 * num_slices * head.decay_numel)
    assert copied[0, SpanKind.COPY_GRAD_OUT] == 4 * embedding.numel
    assert copied[HEAD, SpanKind.COPY_GRAD_OUT] == 4 * num_slices * head.numel
    assert copied[HEAD, SpanKind.COPY_PARTIAL_IN] == 4 * (num_slices - 1) * head.numel


def test_a_tiny_model_is_checked_with_its_ends_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_worker, "check_architecture", check_architecture)
    job: dict[str, Any] = {"placement": Placement(streams_ends=True), "total_steps": 1, "evaluate_every": None}
    train(spec_of(tmp_path / "checked", LAYERS, **job))
    streamed = []

    def refuse(_: Any, *ways: Any) -> None:
        streamed.append(ways)
        raise UnsupportedArchitectureError("not in pieces")

    monkeypatch.setattr(gpu_worker, "check_architecture", refuse)
    spec = spec_of(tmp_path / "refused", LAYERS, **job)
    with pytest.raises(UnsupportedArchitectureError, match="not in pieces"):
        run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert streamed == [({RECOMPUTE_ALL}, True, False, True)]
