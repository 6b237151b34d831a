from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.job.context import (
    GPU_WORKER,
    SCHEDULER,
    ActorKind,
    JobContext,
    SsdFacts,
    actor_in_words,
    aligned,
    box_of,
    evaluation_batch_size,
    gpu_worker_name,
    grad_precision,
    index_of,
    kind_of,
    link_name,
    make_context,
    num_evaluation_groups,
    optimizer_index,
    optimizer_name,
    ssd_name,
)
from windlass.actors.worker_policy.stages import Stage
from windlass.engine.memory_plan.plan import Placement, PlanError
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.model.layout import ModelLayout
from windlass.storage.ids import ALL_FORMATS, ActorName, BlockIndex, ChunkIndex, ChunkKey, Formats, Precision, StateKind
from windlass.storage.io.engines import DEFAULT_IO

LAYOUT = make_layout(3000, 5000, 5000, 100)


def key(block: int, chunk: int) -> ChunkKey:
    return ChunkKey(BlockIndex(block), ChunkIndex(chunk))


def test_names_of_actors_and_texts_of_boxes_for_users() -> None:
    names = [actor_in_words(ActorName(name), ("head", "attic")) for name in ("gpu-0", "b1/link-0")]
    assert names == ["head/gpu-0", "attic/link-0"]
    assert actor_in_words(ActorName("optimizer-0"), ()) == "optimizer-0"
    spec = replace(make_spec(), stages=BOXES[:2])
    assert spec.told_by_box("compiling", 1) == "Box 1: compiling"
    assert replace(spec, box_names=("head", "attic")).told_by_box("compiling", 1) == "Box attic: compiling"
    assert make_spec().told_by_box("compiling", 0) == "compiling"


def test_names_of_actors() -> None:
    assert [optimizer_name(0), optimizer_name(1), ssd_name(3)] == ["optimizer-0", "optimizer-1", "ssd-3"]


def test_names_of_actors_on_other_boxes_begin_with_their_box() -> None:
    assert [gpu_worker_name(1, 0), gpu_worker_name(1, 2), link_name(12)] == ["gpu-1", "b2/gpu-1", "b12/link-0"]
    for name, kind, index, box in (
        (SCHEDULER, ActorKind.SCHEDULER, None, 0),
        (gpu_worker_name(3), ActorKind.GPU_WORKER, 3, 0),
        (ssd_name(10, 12), ActorKind.SSD_SERVER, 10, 12),
    ):
        assert (kind_of(name), box_of(name)) == (kind, box)
        assert index is None or index_of(name) == index


BOXES = (Stage(0, 1), Stage(1, 3), Stage(3, 4))


def context_of_box(box: int, layout: ModelLayout = LAYOUT, **changes: Any) -> JobContext:
    spec = make_spec(stages=BOXES, box=box, **changes)
    return make_context(spec, replace(layout, hidden_size=8), "/arena")


def test_box_has_the_chunks_of_its_own_blocks_only() -> None:
    boxes = [context_of_box(box) for box in range(3)]
    keys = [[key for block in LAYOUT.blocks for key in box.layout.chunk_keys(block.index)] for box in boxes]
    assert [key for own in keys for key in own] == [
        key for block in LAYOUT.blocks for key in LAYOUT.chunk_keys(block.index)
    ]
    for box, own in zip(boxes, keys, strict=True):
        assert {key.block for key in own} == set(range(*box.stage))
        geometry = box.geometry(0)
        assert (geometry.rank, geometry.num_chunks) == (box.spec.box, len(own))
        assert box.layout.numel == sum(map(box.chunk_numel, own))
        assert {box_of(name) for name in (*box.gpu_workers, *box.optimizers)} == {box.spec.box}
    assert sum(box.plan.ssd_nbytes for box in boxes) == make_context(make_spec(), LAYOUT, "/arena").plan.ssd_nbytes


@pytest.mark.parametrize(("box", "num_neighbours"), [(0, 1), (1, 2), (2, 1)])
def test_slots_for_neighbours_are_the_last_of_the_arena(box: int, num_neighbours: int) -> None:
    context = context_of_box(box, num_ranks=2, training={"num_microbatches": 4, "sequence_length": 1000})
    pools = [pool for rank in range(2) for pool in context.crossing_pools(rank)]
    assert len(pools) == 2 * 2 * num_neighbours
    ends = [pool.offset + pool.nbytes for pool in pools]
    assert [pool.offset for pool in pools[1:]] == ends[:-1]
    assert ends[-1] == context.plan.arena_nbytes
    training = context.spec.training
    nbytes = training.microbatch_size * 1000 * 8 * training.precision.itemsize
    assert all(pool.slot_nbytes >= nbytes and pool.num_slots == context.plan.group_size for pool in pools)


def sharing(user: int, block: int) -> ModelLayout:
    """The layout where an operation uses the params of another block, too."""
    shared = [(BlockIndex(each),) for each in range(4)]
    shared[user] = (BlockIndex(user), BlockIndex(block))
    return replace(LAYOUT, shared=tuple(shared))


def test_first_and_last_box_have_slots_for_an_embedding_that_the_head_uses() -> None:
    layout = replace(sharing(3, 0), chunk_numel=1024)  # the embedding has three chunks
    plans = [context_of_box(box, layout, training={"num_microbatches": 4}).plan for box in range(3)]
    slots = [(plan.shared_params.num_slots, plan.shared_sums.num_slots) for plan in plans]
    assert slots == [(3, 2), (0, 0), (2, 3)]
    # Between groups, only sums of the box's own blocks wait in host memory.
    num_chunks = [sum(len(layout.chunk_ranges(block)) for block in range(*stage)) for stage in BOXES]
    assert [plan.partial_grads.num_slots for plan in plans] == [0, 0, 0]
    plans = [
        context_of_box(box, layout, training={"num_microbatches": 4}, placement=Placement(group_size=1)).plan
        for box in range(3)
    ]
    assert [plan.partial_grads.num_slots for plan in plans] == num_chunks


def test_several_gpu_workers_of_the_heads_box_have_slots_for_its_sum_of_the_embedding() -> None:
    layout = replace(sharing(3, 0), chunk_numel=1024)
    options: dict[str, Any] = {"training": {"num_microbatches": 4}, "placement": Placement(group_size=1)}
    one, several = (context_of_box(2, layout, num_ranks=num_ranks, **options) for num_ranks in (1, 2))
    head = [(BlockIndex(3), key) for key in layout.chunk_keys(BlockIndex(3))]
    of_embedding = [(BlockIndex(3), key(0, chunk)) for chunk in range(3)]
    assert list(one.partial_slots()) == head
    assert one.blocks_with_sums_on_device == {0}
    slots = several.partial_slots()
    assert list(slots) == [*head, *of_embedding]
    assert list(slots.values()) == several.plan.partial_grads.spans
    assert not several.blocks_with_sums_on_device


@pytest.mark.parametrize(("user", "block"), [(1, 0), (3, 2)])
def test_other_blocks_that_share_params_are_refused_on_different_boxes(user: int, block: int) -> None:
    with pytest.raises(PlanError, match=rf"blocks \[{block}, {user}\] share tensors, and are on different boxes: only"):
        context_of_box(0, sharing(user, block))


def test_ends_do_not_come_in_pieces_where_a_layer_uses_the_params_of_the_embedding() -> None:
    spec = make_spec(placement=Placement(streamed_blocks=(2,), streams_ends=True))
    assert make_context(spec, sharing(3, 0), "/arena").plan.streamed_blocks == (0, 2)
    with pytest.raises(PlanError, match="only where they are those of the embedding and the head"):
        make_context(spec, sharing(1, 0), "/arena")


@pytest.mark.parametrize(("vocab_size", "is_sliced"), [(1000, False), (2**20, True)])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_head_in_slices_has_slots_for_its_sum_where_its_gradient_is_rounded(
    vocab_size: int, is_sliced: bool, is_known: bool
) -> None:
    """1025 tokens are two slices where the vocabulary is large. Layouts of earlier releases do not tell it."""
    placement = Placement(streamed_blocks=(2,), streams_grads=True, streams_ends=True)
    training = {"num_microbatches": 1, "batch_size": 1, "sequence_length": 1025, "precision": Precision.BF16}
    layout = replace(
        make_layout(3000, 5000, 5000, vocab_size, chunk_numel=2**20), vocab_size=vocab_size if is_known else 0
    )
    plan = make_context(make_spec(placement=placement, training=training), layout, "/arena").plan
    assert plan.fp32_in_pieces == ((3,) if is_sliced else ())
    assert plan.running_sums.num_slots == (1 if is_sliced else 0)


def test_a_head_without_tensors_may_have_slices() -> None:
    placement = Placement(streamed_blocks=(2,), streams_grads=True, streams_ends=True)
    spec = make_spec(placement=placement, training={"num_microbatches": 1, "precision": Precision.BF16})
    assert make_context(spec, make_layout(3000, 5000, 5000, 0), "/arena").plan.fp32_in_pieces == (3,)


def test_blocks_of_other_boxes_cannot_rest_in_memory() -> None:
    with pytest.raises(PlanError, match=r"host_blocks \(0,\) .* blocks of 1 to 2"):
        context_of_box(1, placement=Placement(host_blocks=(0,)))


def test_model_whose_hidden_size_is_unknown_is_refused_on_several_boxes() -> None:
    with pytest.raises(PlanError, match="the size of the model's hidden state is not known"):
        make_context(make_spec(stages=BOXES), LAYOUT, "/arena")


@pytest.mark.parametrize(
    ("precision", "num_microbatches", "accumulation", "expected"),
    [
        (Precision.BF16, 1, Precision.FP32, Precision.BF16),
        (Precision.BF16, 2, Precision.FP32, Precision.FP32),
        (Precision.BF16, 2, Precision.BF16, Precision.BF16),
        (Precision.FP16, 1, Precision.FP32, Precision.FP16),
        (Precision.FP16, 2, Precision.FP32, Precision.FP32),
        (Precision.FP16, 2, Precision.FP16, Precision.FP16),
        (Precision.FP32, 1, Precision.FP32, Precision.FP32),
        (Precision.FP32, 4, Precision.FP32, Precision.FP32),
    ],
)
def test_gradients_travel_in_the_type_they_are_summed_in(
    precision: Precision, num_microbatches: int, accumulation: Precision, expected: Precision
) -> None:
    hyper = {"precision": precision, "num_microbatches": num_microbatches, "accumulation_precision": accumulation}
    spec = make_spec(training=hyper)
    assert grad_precision(spec) is expected
    plan = make_context(spec, LAYOUT, "/arena").plan
    assert plan.grads.slot_nbytes == (4 if expected is Precision.FP32 else 2) * LAYOUT.chunk_numel


@given(num_examples=st.integers(0, 200), batch_size=st.integers(1, 40), num_microbatches=st.integers(1, 8))
def test_evaluation_groups_hold_every_example_in_parts_no_larger_than_in_training(
    num_examples: int, batch_size: int, num_microbatches: int
) -> None:
    num_microbatches = min(num_microbatches, batch_size)
    spec = make_spec(
        num_validation_examples=num_examples,
        training={"batch_size": batch_size, "num_microbatches": num_microbatches},
    )
    size, num_groups = evaluation_batch_size(spec), num_evaluation_groups(spec)
    assert (size - 1) * num_microbatches < batch_size <= size * num_microbatches
    assert spec.has_validation == (num_examples > 0) == (num_groups > 0)
    # Cut as the worker cuts them: micro-batches, then groups as large as in training.
    microbatches = [range(i, min(i + size, num_examples)) for i in range(0, num_examples, size)]
    assert num_groups == len(range(0, len(microbatches), num_microbatches))


@pytest.mark.parametrize("formats", ALL_FORMATS)
def test_all_states_of_a_chunk_fit_one_slot_side_by_side(formats: Formats) -> None:
    hyper = {"precision": formats.precision, "state_precision": formats.states}
    context = make_context(make_spec(training=hyper), LAYOUT, "/arena")
    assert context.formats == context.geometry(0).formats == formats
    end = 0
    for kind, itemsize in formats.itemsizes.items():
        assert context.state_offsets()[kind] == end
        assert end % 4096 == 0
        end += itemsize * LAYOUT.chunk_numel
    assert context.state_offsets().keys() - formats.itemsizes.keys() == {StateKind.GRAD}
    assert context.state_offsets()[StateKind.GRAD] == end  # if gradients may be on an SSD
    assert all(pool.slot_nbytes == end for pool in context.plan.states)
    assert context.plan.params.slot_nbytes == LAYOUT.chunk_numel * formats.itemsizes[formats.param_kind]
    assert formats.param_kind in context.state_offsets()


def test_geometries_share_out_all_chunks() -> None:
    context = make_context(make_spec(), LAYOUT, "/arena")
    geometries = [context.geometry(i) for i in range(2)]
    assert [geometry.num_local_chunks for geometry in geometries] == [5, 4]
    assert geometries[0].chunks_per_block == (2, 3, 3, 1)
    assert {int(geometries[0].ssd_of(k)) for block in LAYOUT.blocks for k in LAYOUT.chunk_keys(block.index)} == {0, 1}
    assert (geometries[1].job, geometries[1].attempt, int(geometries[1].ssd)) == ("ftjob-1", 2, 1)


@pytest.mark.parametrize(
    ("weights", "num_slots", "expected"),
    [((1, 1), 7, [3, 4]), ((3, 1), 8, [6, 2]), ((1, 1, 1), 2, [0, 1, 1]), ((5, 2, 2), 1000, [555, 222, 223])],
)
def test_slots_for_activations_are_shared_out_by_weight(
    weights: tuple[int, ...], num_slots: int, expected: list[int]
) -> None:
    spec = make_spec(
        ssd_dirs=tuple(f"/ssd{i}" for i in range(len(weights))),
        placement=Placement(ssd_activation_nbytes=num_slots << 20),
    )
    context = make_context(spec, LAYOUT, "/arena", tuple(SsdFacts(io=DEFAULT_IO, weight=each) for each in weights))
    assert [context.num_scratch_slots(i) for i in range(len(weights))] == expected


def test_a_block_without_parameters_is_stored_like_any_other() -> None:
    context = make_context(make_spec(), make_layout(3000, 5000, 0), "/arena")
    assert context.geometry(0).chunks_per_block == (2, 3, 1)
    assert context.chunk_numel(key(2, 0)) == 0


def test_the_last_chunk_of_a_block_may_be_short() -> None:
    context = make_context(make_spec(), LAYOUT, "/arena")
    assert [context.chunk_numel(k) for k in LAYOUT.chunk_keys(BlockIndex(1))] == [2048, 2048, 904]


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)])
def test_transfers_are_whole_pages(nbytes: int, expected: int) -> None:
    assert aligned(nbytes) == expected


@pytest.mark.parametrize(
    ("training", "has_all"),
    [
        ({}, False),
        ({"clip_norm": 1.0}, True),
        ({"precision": Precision.FP16}, True),
        ({"update_order": UpdateOrder.ACTIVE}, False),
        ({"update_order": UpdateOrder.NAIVE}, False),
        ({"update_order": UpdateOrder.KEPT}, True),
        ({"update_order": UpdateOrder.AFTER_BACKWARD}, True),
    ],
)
def test_every_gradient_has_a_slot_where_all_must_be_known(training: dict[str, Any], has_all: bool) -> None:
    num_blocks = 30
    layout = make_layout(*[2000] * num_blocks)
    num_slots = make_context(make_spec(training=training), layout, "/arena").plan.grads.num_slots
    assert (num_slots >= num_blocks) == has_all


def test_a_slot_for_states_has_room_for_a_gradient_that_was_on_an_ssd() -> None:
    placement = Placement(num_host_grad_blocks=1)
    context = make_context(make_spec(placement=placement, training={"clip_norm": 1.0}), LAYOUT, "/arena")
    end = context.state_offsets()[StateKind.GRAD] + context.plan.grads.slot_nbytes
    assert all(pool.slot_nbytes == end for pool in context.plan.states)


def test_states_that_rest_in_host_memory_have_a_slot_for_each_chunk() -> None:
    context = make_context(make_spec(placement=Placement(host_blocks=(3, 1))), LAYOUT, "/arena")
    slots, pool = context.host_slots(), context.plan.host_states
    assert list(slots) == [key(1, 0), key(1, 1), key(1, 2), key(3, 0)]
    assert [slot.offset for slot in slots.values()] == [pool.offset + i * pool.slot_nbytes for i in range(4)]
    assert {slot.nbytes for slot in slots.values()} == {context.geometry(0).extent_nbytes}


def test_each_use_of_a_chunk_has_a_slot_for_its_sums() -> None:
    """The head uses the first block, too. The sums of a block on the device stay there."""
    layout = replace(LAYOUT, shared=tuple(tuple(map(BlockIndex, uses)) for uses in ((0,), (1,), (2,), (3, 0))))
    spec = make_spec(placement=Placement(group_size=1, device_blocks=(1,)), training={"num_microbatches": 2})
    context = make_context(spec, layout, "/arena")
    slots, pool = context.partial_slots(), context.plan.partial_grads
    of_embedding, of_layer = [key(0, 0), key(0, 1)], [key(2, 0), key(2, 1), key(2, 2)]
    assert list(slots) == [
        *((BlockIndex(0), each) for each in of_embedding),
        *((BlockIndex(2), each) for each in of_layer),
        (BlockIndex(3), key(3, 0)),
        *((BlockIndex(3), each) for each in of_embedding),
    ]
    assert len(slots) == pool.num_slots
    assert [slot.offset for slot in slots.values()] == [pool.offset + i * pool.slot_nbytes for i in range(len(slots))]
    assert {slot.nbytes for slot in slots.values()} == {4 * LAYOUT.chunk_numel}
    assert make_context(make_spec(), layout, "/arena").partial_slots() == {}


def test_a_budget_that_is_too_small_is_refused() -> None:
    changes: dict[str, Any] = {"host_memory_nbytes": 10_000}
    with pytest.raises(PlanError, match=r"its budget of 9\.77 KiB"):
        make_context(make_spec(**changes), LAYOUT, "/arena")


@pytest.mark.parametrize(
    ("name", "kind", "index"),
    [
        (optimizer_name(12), ActorKind.OPTIMIZER, 12),
        (ssd_name(3), ActorKind.SSD_SERVER, 3),
        (GPU_WORKER, ActorKind.GPU_WORKER, 0),
    ],
)
def test_name_of_an_actor_has_its_kind_and_index(name: ActorName, kind: ActorKind, index: int) -> None:
    assert (kind_of(name), index_of(name)) == (kind, index)
    assert optimizer_index(name) == (index if kind is ActorKind.OPTIMIZER else None)


def test_kind_of_the_scheduler_is_its_name_and_other_names_are_refused() -> None:
    assert kind_of(SCHEDULER) is ActorKind.SCHEDULER
    with pytest.raises(ValueError, match="tape"):
        kind_of(ActorName("tape-0"))
