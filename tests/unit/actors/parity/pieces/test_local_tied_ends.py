"""Whole jobs whose tied embedding and head have their matrix in pieces: the same bits as with a whole one."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.reference_loop import train_plainly
from tests.support.training import make_partition
from tests.unit.actors.parity.pieces.test_local_ends import CUT, HEAD, JOBS, sliced_head, trained_in_both_ways
from tests.unit.actors.parity.pieces.test_local_pieces import LAYERS, planned_buffers, spec_of, train
from tests.unit.actors.parity.test_local_parity import LOSS_TOLERANCE, assert_params_agree
from windlass.actors.messages import Message, SpanKind, SpansReported
from windlass.engine.device.buffer_pool import BufferClass
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import ActorName, HeadSlices, Precision

pytestmark = pytest.mark.usefixtures("small_activation_slots", "unchecked_activations")

planned, sliced = planned_buffers, sliced_head  # fixtures
ALL_IN_PIECES = Placement(streamed_blocks=LAYERS, streams_grads=True, streams_ends=True, num_grad_buffers=1)
QUICK = (("one micro-batch", CUT), ("groups", CUT))


@pytest.mark.short("groups-1800")
@pytest.mark.parametrize(
    ("name", "cut_matrices"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.long])
        for case in product((name for name in JOBS if name != "the head rests on the device"), (None, CUT))
    ],
)
def test_a_tied_matrix_in_pieces_gives_the_bits_of_a_whole_one(
    tmp_path: Path, name: str, cut_matrices: int | None
) -> None:
    job = {"placement": Placement()} | JOBS[name]
    trained_in_both_ways(tmp_path, cut_matrices=cut_matrices, tied=True, **job)


@pytest.mark.long
@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize("cut_matrices", [None, CUT])
@pytest.mark.parametrize("head_slices", HeadSlices)
@pytest.mark.parametrize(
    ("precision", "num_microbatches", "group_size"),
    [(precision, *size) for precision in Precision for size in ((1, None), (4, None), (4, 1), (4, 3))],
)
def test_sums_over_slices_of_a_tied_head_go_out_and_come_back(
    tmp_path: Path,
    cut_matrices: int | None,
    head_slices: HeadSlices,
    precision: Precision,
    num_microbatches: int,
    group_size: int | None,
) -> None:
    """The fifth step, the last of an epoch, has two micro-batches of four: some groups have none."""
    trained_in_both_ways(
        tmp_path,
        streams_grads=(True,),
        tied=True,
        cut_matrices=cut_matrices,
        precision=precision,
        num_microbatches=num_microbatches,
        batch_size=4 * num_microbatches if num_microbatches == 1 else 8,
        clip_norm=0.5,
        head_slices=head_slices,
        total_steps=6,
        evaluate_every=3,
        placement=Placement(num_cached_params=0, group_size=group_size),
    )


@pytest.mark.long
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_job_with_a_tied_matrix_in_parts_agrees_with_plain_pytorch(tmp_path: Path, precision: Precision) -> None:
    job: dict[str, Any] = {"precision": precision, "num_microbatches": 2, "total_steps": 4, "evaluate_every": 2}
    spec = spec_of(tmp_path, LAYERS, tied=True, cut_matrices=CUT, **job | {"placement": ALL_IN_PIECES})
    found, plain, tolerance = train(spec), train_plainly(spec), LOSS_TOLERANCE[precision]
    assert found.losses == pytest.approx(plain.losses, rel=tolerance)
    assert_params_agree(found.params, plain.params, precision)


def test_the_device_has_no_buffer_of_the_tied_matrix(
    tmp_path: Path, planned: dict[str, dict[BufferClass, int]]
) -> None:
    moved: Counter[tuple[int, SpanKind]] = Counter()

    def look(_: ActorName, message: Message) -> None:
        for span in message.spans if isinstance(message, SpansReported) else ():
            moved[span.block, span.kind] += span.nbytes

    job: dict[str, Any] = {"precision": Precision.BF16, "total_steps": 1, "evaluate_every": None, "tied": True}
    spec = spec_of(tmp_path, LAYERS, cut_matrices=CUT, **job | {"placement": ALL_IN_PIECES})
    spec = replace(spec, num_validation_examples=0)
    train(spec, on_message=look)
    embedding, layer, *_, head = make_partition(spec).layout.blocks
    small = layer.numel - layer.decay_numel
    assert {numel for buffers in planned.values() for numel, _ in buffers} == {0, small, head.numel}
    # Released buffers are filled with NaN, so no operation uses what an earlier one has copied.
    assert moved[0, SpanKind.COPY_PARAMS_IN] == 2 * (2 + 2) * embedding.numel, "forward and backward, of both modules"
    assert moved[HEAD, SpanKind.COPY_PARAMS_IN] == 2 * head.numel
    # The head's sum goes out in fp32 and comes back, to be added to the embedding's; the gradient leaves in 16 bits.
    assert moved[HEAD, SpanKind.COPY_PARTIAL_OUT] == moved[0, SpanKind.COPY_PARTIAL_IN] == 4 * embedding.numel
    assert moved[0, SpanKind.COPY_GRAD_OUT] == 2 * embedding.numel
