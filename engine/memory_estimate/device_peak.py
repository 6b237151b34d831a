"""Estimates the peak of a job's device memory, from shapes alone."""

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace

from windlass.engine.lanes import LaneDivision
from windlass.engine.memory_estimate.model_facts import ModelFacts, Passes, PassNeeds
from windlass.engine.memory_plan import (
    ADDED_NUMEL,
    NO_NEED,
    NUM_PIECE_BUFFERS,
    PARTIAL_GRAD_ITEMSIZE,
    DeviceNeed,
    Plan,
    UnitNeed,
    cut_layers,
    evaluation_moments,
    grad_buffers_of_job,
    largest_piece,
    param_buffer_numels,
    param_buffers,
    rounded_numel,
    rounding_nbytes,
    step_moments,
    streamed_grads_nbytes,
    summed_in_fp32,
)
from windlass.engine.model import ModelLayout
from windlass.engine.optimizer import NORM_SCRATCH_NBYTES, update_scratch_nbytes
from windlass.engine.slices import num_slice_tokens
from windlass.storage.ids import BlockIndex, Formats, HeadSlices, Precision

# Bytes of a token id or a target, which are int64.
_TOKEN_NBYTES = 8


def device_need(
    facts: ModelFacts,
    plan: Plan,
    shapes: Sequence[tuple[int, int]],
    *,
    formats: Formats,
    grad_precision: Precision,
    num_microbatches: int,
    num_lanes: int = 1,
    num_ahead: int,
    max_tokens: int,
    head_slices: HeadSlices,
    cut_matrices: int | None = None,
    evaluation_shapes: Sequence[tuple[int, int]] = (),
    on_gpu: bool = False,
    layout: ModelLayout | None = None,
    num_groups_in_flight: int = 1,
) -> DeviceNeed:
    """Returns the device memory of a job at the worst moment of a step or of an evaluation.

    Args:
        facts: those of the model.
        plan: the plan that the job obeys.
        shapes: (examples, tokens) of the micro-batches of a step's largest group.
        formats: the number formats of the model states.
        grad_precision: of gradients that are sent to the optimizer.
        num_microbatches: the micro-batches of a step.
        num_lanes: the lanes of a step's micro-batches.
        num_ahead: operations whose params may be prefetched (`Ordering.max_prefetched`).
        max_tokens: the largest number of tokens of any micro-batch, evaluations included; sizes the buffers.
        head_slices: the way in which the head goes over tokens.
        cut_matrices: as in the job's `TrainingConfig`.
        evaluation_shapes: (examples, tokens) of the micro-batches of an evaluation's group.
        on_gpu: the job runs on a GPU, whatever device the facts are for.
        layout: as the job's box sees it; None: the box has all blocks.
        num_groups_in_flight: the groups of micro-batches whose activations are on the device at once.

    Raises:
        DeviceNeedUnknownError: a block cannot be run by shapes alone.
    """
    layout = layout or facts.layout
    choices = {BlockIndex(i): choice for i, choice in enumerate(plan.layer_activations, start=1)}

    @functools.cache  # micro-batches of one shape need the same
    def needs(num_examples: int, num_tokens: int, *, train: bool) -> PassNeeds:
        passes = Passes(
            num_examples=num_examples,
            num_tokens=num_tokens,
            train=train,
            grad_precision=grad_precision,
            is_summed=num_microbatches > 1,
            head_slices=head_slices,
            cut_matrices=cut_matrices,
        )
        return _of_box(facts.needs(choices if train else {}, passes), layout)

    of_group = [needs(*shape, train=True) for shape in shapes]
    step = step_moments(
        *_by_unit(of_group), leaving_nbytes=plan.leaving_nbytes, has_ssd_store=plan.num_ssd_activations > 0
    )
    of_evaluation = list(evaluation_moments(*_by_unit([needs(*shape, train=False) for shape in evaluation_shapes])))
    moment, activations = max([step.worst, *of_evaluation], key=lambda each: each[1].nbytes)
    is_sliced = max_tokens > num_slice_tokens(head_slices, facts.vocab_size)
    in_fp32 = set(filter(layout.is_own, summed_in_fp32(facts.layout.shared, is_sliced=is_sliced)))
    numels = [block.numel for block in layout.blocks]
    grads = grad_buffers_of_job(
        numels,
        layout.shared,
        itemsize=grad_precision.itemsize,
        summed_in_fp32=in_fp32,
        resident=plan.device_blocks,
        num_groups=plan.num_groups,
        num_grad_buffers=plan.num_grad_buffers,
        elsewhere=(*plan.grad_streamed_blocks, *plan.grad_overlaid_blocks),
        tied_in_pieces=plan.tied_in_pieces,
        lanes=LaneDivision(num_lanes, num_microbatches),
        group_size=plan.group_size,
    )
    updates_on_gpu = on_gpu and bool(plan.device_blocks)
    rounded = rounded_numel(formats, layout.chunk_numel, resident=plan.device_blocks, on_gpu=on_gpu)
    batch_nbytes = sum(2 * _TOKEN_NBYTES * num_examples * num_tokens for num_examples, num_tokens in shapes)
    return DeviceNeed(
        params_nbytes=_params_numel(layout, numels, plan, num_ahead, formats, cut_matrices)
        * formats.precision.itemsize,
        grads_nbytes=sum(numel * itemsize * number for (numel, itemsize), number in grads.items())
        + sum(layout.blocks[block].numel for block in layout.lent) * PARTIAL_GRAD_ITEMSIZE  # sums of another box
        + _streamed_grads_nbytes(
            layout,
            numels,
            plan,
            itemsize=grad_precision.itemsize,
            in_fp32=in_fp32,
            is_summed=num_microbatches > 1,
            has_lanes=num_lanes > 1,
            cut_matrices=cut_matrices,
        ),
        states_nbytes=sum(layout.blocks[block].numel for block in plan.device_blocks) * formats.update_itemsize,
        constants_nbytes=facts.buffers_nbytes
        + batch_nbytes
        + (update_scratch_nbytes(formats.states) if updates_on_gpu else 0)
        + (NORM_SCRATCH_NBYTES if num_lanes > 1 else 0)
        + rounded * formats.precision.itemsize
        + _adding_nbytes(numels, formats.precision, is_summed=num_microbatches > 1 or bool(in_fp32))
        + rounding_nbytes(numels, in_fp32, itemsize=grad_precision.itemsize),
        activations=activations,
        moment=moment,
        settled_activations_nbytes=max(
            step.most_settled_nbytes, *(need.settled_nbytes for _, need in of_evaluation), 0
        ),
        waiting_nbytes=_waiting_nbytes(of_group, shapes, layout, num_groups_in_flight, formats.precision),
    )


def _adding_nbytes(numels: Sequence[int], precision: Precision, *, is_summed: bool) -> int:
    """Returns the bytes in which a CPU converts parts of gradients before it adds them to fp32 sums.

    A GPU needs none. They are few, so they are counted for all devices, as the operations' own memory is.
    """
    if not is_summed or precision is Precision.FP32:
        return 0
    return min(max(numels), ADDED_NUMEL) * Precision.FP32.itemsize


def _of_box(needs: PassNeeds, layout: ModelLayout) -> PassNeeds:
    """Returns the needs of the blocks that a box computes. The others need nothing."""
    if layout.own is None:
        return needs
    units = tuple(unit if layout.is_own(block) else NO_NEED for block, unit in enumerate(needs.units))
    peak_nbytes = needs.head_peak_nbytes if layout.is_own(len(layout.blocks) - 1) else 0
    return replace(needs, units=units, head_peak_nbytes=peak_nbytes)


def _waiting_nbytes(
    of_group: Sequence[PassNeeds],
    shapes: Sequence[tuple[int, int]],
    layout: ModelLayout,
    num_groups_in_flight: int,
    precision: Precision,
) -> int:
    """Returns the bytes of activations that wait for other boxes, and of a group's hidden states from and to them."""
    if layout.own is None:
        return 0
    held_nbytes = sum(unit.held_nbytes for needs in of_group for unit in needs.units)
    hidden_nbytes = sum(examples * tokens for examples, tokens in shapes) * layout.hidden_size * precision.itemsize
    return (num_groups_in_flight - 1) * held_nbytes + 2 * hidden_nbytes


def _by_unit(microbatches: Sequence[PassNeeds]) -> tuple[list[list[UnitNeed]], list[int]]:
    """Returns the needs of the embedding and each layer, per micro-batch, and the head's peaks, per micro-batch."""
    by_microbatch = [needs.units for needs in microbatches]
    return [list(row) for row in zip(*by_microbatch, strict=True)], [needs.head_peak_nbytes for needs in microbatches]


def _streamed_grads_nbytes(
    layout: ModelLayout,
    numels: Sequence[int],
    plan: Plan,
    *,
    itemsize: int,
    in_fp32: Collection[int],
    is_summed: bool,
    has_lanes: bool,
    cut_matrices: int | None,
) -> int:
    """Returns the bytes of the memory in which gradients in pieces lie."""
    streamed = plan.grad_streamed_blocks
    bounds = cut_layers([layout.blocks[block].part_numels_by_module(cut_matrices) for block in streamed])
    return streamed_grads_nbytes(
        numels,
        dict(zip(streamed, bounds, strict=True)),
        plan.grad_overlaid_blocks,
        itemsize=itemsize,
        summed_in_fp32=in_fp32,
        is_summed=is_summed,
        fp32_in_pieces=plan.fp32_in_pieces,
        has_lanes=has_lanes,
        chunk_numel=layout.chunk_numel,
    )


def _params_numel(
    layout: ModelLayout,
    numels: Sequence[int],
    plan: Plan,
    num_ahead: int,
    formats: Formats,
    cut_matrices: int | None,
) -> int:
    """Returns the elements of all buffers for params: whole blocks, unstreamed parts of streamed blocks, and pieces."""
    streamed = plan.streamed_blocks
    bounds = cut_layers([layout.blocks[block].part_numels_by_module(cut_matrices) for block in streamed])
    in_pieces = {block: cuts[-1] for block, cuts in zip(streamed, bounds, strict=True)}
    whole = [numel - in_pieces.get(block, 0) for block, numel in enumerate(numels)]
    buffers = param_buffers(
        param_buffer_numels(whole, ends_share=plan.ends_share_params),
        layout.shared,
        resident=(*formats.lent(plan.device_blocks), *layout.borrowed),
        num_ahead=num_ahead,
    )
    borrowed_numel = sum(layout.blocks[block].numel for block in layout.borrowed)  # they have a buffer of their own
    numel = sum(numel * number for numel, number in buffers.items()) + borrowed_numel
    return numel + NUM_PIECE_BUFFERS * largest_piece(bounds)
