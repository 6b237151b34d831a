"""Whole jobs whose matrices are cut: the same bits in every plan, and numbers within rounding of whole matrices."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.stage_runs import STAGES, run_attempt
from tests.support.actors.whole_jobs import Run
from tests.support.cut_off import CutOff
from tests.support.reference_loop import train_plainly
from tests.support.training import boxes_of, make_partition, metrics_of
from tests.unit.actors.parity.pieces.test_local_pieces import INPUT, LAYERS, SWAP, spec_of, train
from tests.unit.actors.parity.test_local_parity import LOSS_TOLERANCE, assert_params_agree
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.job.context import make_context, piece_bounds
from windlass.actors.messages import Message, SpanKind, SpansReported, UpdateStep
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.param_slices import largest_piece
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.model.layout import UnsupportedArchitectureError
from windlass.storage.ids import ActorName, Attempt, BlockIndex, Precision

pytestmark = pytest.mark.usefixtures("small_activation_slots")

# Matrices have 2048 (keys and values), 4096 and 8192 elements, and their parts 1024 or 1536. So some parts lie in two
# chunks, which have 8192.
CUT = 1800
KEEP = ActivationChoice.KEEP
GRADS = Placement(streams_grads=True, num_cached_params=0)
JOBS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"precision": Precision.BF16, "dropout": 0.1},
    "sums": {"num_microbatches": 4, "clip_norm": 0.5},
    "tied lanes": {"precision": Precision.BF16, "num_microbatches": 4, "lanes": 2, "tied": True, "clip_norm": 0.5},
    "scaled losses": {"precision": Precision.FP16, "num_microbatches": 4, "lanes": 4},
    "narrow sums": {
        "precision": Precision.BF16,
        "num_microbatches": 2,
        "accumulation_precision": Precision.BF16,
    },
}
# For each job: streamed layers, GPUs, and the rest of a plan.
PLANS: dict[str, tuple[tuple[int, ...], int, Placement]] = {
    "pieces": (LAYERS, 1, Placement(num_cached_params=7)),
    "gradients in pieces": (LAYERS, 1, GRADS),
    "groups": ((1, 3), 1, replace(GRADS, group_size=2)),
    "kept graphs": (LAYERS, 1, replace(GRADS, activations=KEEP.of_layers(3))),
    "kept graphs of whole layers": ((), 1, Placement(activations=KEEP.of_layers(3), device_blocks=(2,))),
    "swapped": (
        (2, 3),
        1,
        replace(
            GRADS,
            activations=(*SWAP.of_layers(1), *INPUT.of_layers(1), *SWAP.of_layers(1)),
            host_activation_nbytes=4 << 20,
        ),
    ),
    "GPUs": (LAYERS, 2, replace(GRADS, group_size=2)),
    "GPUs with whole layers": ((), 2, Placement(group_size=2, host_blocks=(1,), commit_every=2)),
}
SEVERAL = ("groups", "GPUs", "GPUs with whole layers")  # need several micro-batches
CASES = [(job, plan) for job, plan in product(JOBS, PLANS) if plan not in SEVERAL or "num_microbatches" in JOBS[job]]
QUICK = [("sums", "gradients in pieces"), ("tied lanes", "GPUs"), ("one micro-batch", "swapped")]


def cut_spec(root: Path, streamed: tuple[int, ...], **changes: Any) -> Any:
    return spec_of(root, streamed, cut_matrices=CUT, **changes)


@pytest.mark.usefixtures("unchecked_activations")
@pytest.mark.parametrize(
    ("job", "plan"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.long]) for case in CASES],
)
def test_every_plan_of_a_job_with_cut_matrices_has_the_same_bits(tmp_path: Path, job: str, plan: str) -> None:
    whole = train(cut_spec(tmp_path / "whole", (), **JOBS[job]))
    streamed, num_ranks, placement = PLANS[plan]
    if JOBS[job].get("lanes") == 4 and placement.group_size is None:
        placement = replace(placement, group_size=1)  # whole lanes, one after the other
    spec = cut_spec(tmp_path / "plan", streamed, **JOBS[job] | {"placement": placement})
    train(replace(spec, num_ranks=num_ranks)).assert_equals(whole)


@pytest.mark.usefixtures("unchecked_activations")
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("streamed", [pytest.param((), marks=pytest.mark.long), LAYERS])
def test_cut_matrices_on_several_boxes_have_the_bits_of_one(
    tmp_path: Path, *, streamed: tuple[int, ...], tied: bool
) -> None:
    job: dict[str, Any] = {"precision": Precision.BF16, "num_microbatches": 4, "lanes": 2, "clip_norm": 0.5}
    job["tied"] = tied
    whole = train(cut_spec(tmp_path / "whole", (), **job))
    spec = cut_spec(tmp_path / "boxes", streamed, **job | {"placement": GRADS if streamed else Placement()})
    first, *others = boxes_of(spec, STAGES["2-3"])
    outcome = run_attempt(first, *others)
    assert outcome["status"] == "succeeded", outcome
    Run.of(spec).assert_equals(whole)


@pytest.mark.parametrize("precision", [Precision.FP32, pytest.param(Precision.BF16, marks=pytest.mark.long)])
def test_job_with_cut_matrices_agrees_with_plain_pytorch_and_whole_matrices(
    tmp_path: Path, precision: Precision
) -> None:
    job: dict[str, Any] = {"precision": precision, "num_microbatches": 2, "total_steps": 6, "evaluate_every": 3}
    spec = cut_spec(tmp_path, LAYERS, placement=GRADS, **job)
    found, plain, tolerance = train(spec), train_plainly(spec), LOSS_TOLERANCE[precision]
    assert found.losses == pytest.approx(plain.losses, rel=tolerance)
    assert metrics_of(spec, "valid_loss") == pytest.approx(plain.validation_losses, rel=tolerance)
    assert_params_agree(found.params, plain.params, precision)


@pytest.mark.usefixtures("unchecked_activations")
def test_an_attempt_goes_on_with_matrices_in_other_places(tmp_path: Path) -> None:
    """It began with whole layers, and ends with pieces on another number of GPUs."""
    job: dict[str, Any] = {"precision": Precision.BF16, "clip_norm": 0.5, "num_microbatches": 4, "lanes": 2}
    job |= {"total_steps": 3, "evaluate_every": None}
    whole = train(cut_spec(tmp_path / "whole", LAYERS, placement=GRADS, **job))
    spec = cut_spec(tmp_path / "cut", (), **job)

    def cut(to: ActorName, message: Message) -> None:
        if isinstance(message, UpdateStep) and message.step == 2:
            raise CutOff

    with pytest.raises(CutOff):
        train(spec, on_message=cut)
    pieces = replace(GRADS, streamed_blocks=LAYERS)
    train(replace(spec, attempt=Attempt(2), placement=pieces, num_ranks=2)).assert_equals(whole)


@pytest.mark.usefixtures("unchecked_activations")
def test_no_piece_on_the_device_is_larger_than_the_parts(tmp_path: Path) -> None:
    """And rows and columns are copied: whole layers for the forward pass, and again twice for the backward pass."""
    nbytes: Counter[int] = Counter()
    largest: Counter[int] = Counter()

    def look(_: ActorName, message: Message) -> None:
        for span in message.spans if isinstance(message, SpansReported) else ():
            if span.block in LAYERS:
                largest[span.kind] = max(largest[span.kind], span.nbytes)
                nbytes[span.kind] += span.nbytes

    job: dict[str, Any] = {"total_steps": 1, "evaluate_every": None, "num_validation_examples": 0}
    spec = cut_spec(tmp_path, LAYERS, placement=GRADS, **job)
    context = make_context(spec, make_partition(spec).layout, "/arena")
    part = 24 * 64  # rows of a matrix of the MLP
    assert largest_piece(list(piece_bounds(context).values())) == part
    train(spec, on_message=look)
    layer = context.layout.blocks[1]
    assert largest[SpanKind.COPY_PARAMS_IN] == largest[SpanKind.COPY_GRAD_OUT] == 4 * part
    assert nbytes[SpanKind.COPY_GRAD_OUT] == 4 * layer.numel * len(LAYERS)
    # Released buffers are filled with NaN, so no pass can use what an earlier one has copied.
    assert nbytes[SpanKind.COPY_PARAMS_IN] >= 3 * 4 * layer.decay_numel * len(LAYERS)


@pytest.mark.parametrize("streamed", [(), (2,)])
def test_a_tiny_model_is_checked_with_cut_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: tuple[int, ...]
) -> None:
    checked: list[tuple[Any, ...]] = []

    def check(_: Any, *ways: Any) -> None:
        checked.append(ways)
        if not ways[1]:
            raise UnsupportedArchitectureError("not in parts")

    monkeypatch.setattr(gpu_worker, "check_architecture", check)
    spec = cut_spec(tmp_path, streamed)
    with pytest.raises(UnsupportedArchitectureError, match="not in parts"):
        run_local(spec, partition=make_partition(spec))
    assert [ways[1:3] for ways in checked] == [(True, True), (False, True)][not streamed :]


def test_pieces_of_a_cut_matrix_follow_one_another(tmp_path: Path) -> None:
    spec = cut_spec(tmp_path, (2,))
    layout = make_partition(spec).layout
    bounds = piece_bounds(make_context(spec, layout, "/arena"))[BlockIndex(2)]
    starts = {offset for _, offset, _ in layout.grad_parts(2, CUT)}
    assert set(bounds[:-1]) <= starts
    assert bounds[-1] == layout.blocks[2].decay_numel
