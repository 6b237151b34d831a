"""Simulated jobs with several GPU workers: the SSDs move the same bytes, and steps are shorter where compute binds."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.support.actors.specs import make_layout
from tests.support.planner.simulated import CHUNK, Simulated, job, layers_of, moved, rates
from windlass.actors.job.context import gpu_worker_name
from windlass.actors.messages import SpanKind, WorkSpan
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import BlockIndex

NUM_MICROBATCHES = 8
NUM_BLOCKS = 12
NUMEL = NUM_BLOCKS * 2 * CHUNK
RANKS = (1, 2, 3, 4)
ON_SSDS = (SpanKind.READ_PARAMS, SpanKind.READ_STATES, SpanKind.WRITE_STATES)
QUITE_FAST = rates(h2d_bytes=1e6, d2h_bytes=1e6, ssd_read_bytes=(1e6, 1e6), ssd_write_bytes=(1e6, 1e6))


def ranked(num_ranks: int, group_size: int | None = None, **options: Any) -> Simulated:
    """A job in which every rank has one group, unless the groups are given."""
    training = {"num_microbatches": NUM_MICROBATCHES, **options.pop("training", {})}
    placement = Placement(group_size=group_size, num_cached_params=0, **options.pop("placement", {}))
    options = {"machine": QUITE_FAST, "num_blocks": NUM_BLOCKS} | options
    found = job(num_ranks=num_ranks, training=training, placement=placement, **options)
    # An operation takes a second for each micro-batch, whatever the groups are.
    compute_s = {key: float(found.context.plan.group_size) for key in found.work.compute_s}
    return replace(found, work=replace(found.work, compute_s=compute_s))


def of_rank(spans: list[WorkSpan], rank: int, *kinds: SpanKind) -> list[WorkSpan]:
    name = gpu_worker_name(rank)
    return [span for span in spans if span.resource.startswith(f"{name}/") and span.kind in kinds]


@pytest.mark.short("tied-2", "overlapped-4", "clipped-3", "with lanes-4")
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("order", ["overlapped", "clipped", "tied", "with lanes"])
def test_jobs_end_with_the_bytes_of_one_rank_on_the_ssds(num_ranks: int, order: str) -> None:
    options: dict[str, Any] = {}
    if order == "clipped":
        options["training"] = {"clip_norm": 1.0}
    if order == "with lanes":
        options["training"] = {"lanes": 3}
    if order == "tied":
        layout = make_layout(*[2 * CHUNK] * NUM_BLOCKS, chunk_numel=CHUNK)
        head = (BlockIndex(NUM_BLOCKS - 1), BlockIndex(0))
        options["layout"] = replace(layout, shared=(*layout.shared[:-1], head))
    one, several = ranked(1, **options).spans(), ranked(num_ranks, **options).spans()
    for step in range(1, 5):
        for kind in ON_SSDS:
            assert moved(several, kind, step) == moved(one, kind, step)
        assert moved(several, SpanKind.COPY_GRAD_OUT, step) == moved(one, SpanKind.COPY_GRAD_OUT, step)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_every_rank_copies_params_and_passes_on_its_sums(num_ranks: int) -> None:
    spans = ranked(num_ranks).spans()
    for rank in range(num_ranks):
        # A rank's buffers still have the last layer after the head.
        params = of_rank(spans, rank, SpanKind.COPY_PARAMS_IN)
        assert moved(params, SpanKind.COPY_PARAMS_IN, 2) == 2 * 2 * CHUNK * (2 * NUM_BLOCKS - 2)
        out, back = SpanKind.COPY_PARTIAL_OUT, SpanKind.COPY_PARTIAL_IN
        assert moved(of_rank(spans, rank, out), out, 2) == (4 * NUMEL if rank < num_ranks - 1 else 0)
        assert moved(of_rank(spans, rank, back), back, 2) == (4 * NUMEL if rank > 0 else 0)
    last = of_rank(spans, num_ranks - 1, SpanKind.COPY_GRAD_OUT)
    assert moved(last, SpanKind.COPY_GRAD_OUT) == moved(spans, SpanKind.COPY_GRAD_OUT) > 0


@pytest.mark.parametrize(("num_ranks", "group_size"), [(2, 4), (2, 1), (3, 2), (4, 2)])
def test_sums_pass_through_the_groups_in_order(num_ranks: int, group_size: int) -> None:
    spans = [span for span in ranked(num_ranks, group_size, num_steps=2).spans() if span.step == 2]
    num_groups = -(-NUM_MICROBATCHES // group_size)
    for block in range(NUM_BLOCKS):
        of_block = sorted((span for span in spans if span.block == block), key=lambda span: span.start_s)
        added = [span for span in of_block if span.kind in (SpanKind.HEAD, SpanKind.BACKWARD)]
        assert [span.resource for span in added] == [f"gpu-{group % num_ranks}/compute" for group in range(num_groups)]
        out = [span for span in of_block if span.kind is SpanKind.COPY_PARTIAL_OUT]
        back = [span for span in of_block if span.kind is SpanKind.COPY_PARTIAL_IN]
        assert len(out) == len(back) == 2 * (num_groups - 1)
        for group, (first, second) in enumerate(itertools.pairwise(added)):
            assert first.end_s <= out[2 * group].start_s
            assert out[2 * group + 1].end_s <= back[2 * group].start_s
            assert back[2 * group + 1].end_s <= second.start_s


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("num_ranks", "lanes"), [(2, 4), (4, 4), (4, 8), (2, 1)])
def test_slots_of_the_total_of_embedding_and_head_are_free_when_their_operation_ends(
    num_ranks: int, lanes: int, is_tied: bool
) -> None:
    layers = tuple(range(1, NUM_BLOCKS - 1))
    layout = layers_of((2 * CHUNK,), (CHUNK,), num_norms=10, num_blocks=NUM_BLOCKS, head_numel=8 * CHUNK)
    if is_tied:
        layout = replace(layout, shared=(*layout.shared[:-1], (BlockIndex(NUM_BLOCKS - 1), BlockIndex(0))))
    options = {"layout": layout, "placement": {"streamed_blocks": layers, "streams_grads": True}}
    fast = rates(h2d_bytes=1e9, d2h_bytes=1e9, ssd_read_bytes=(1e9, 1e9), ssd_write_bytes=(1e9, 1e9))
    spans = ranked(num_ranks, training={"lanes": lanes}, machine=fast, num_steps=2, **options).spans()
    for rank in range(num_ranks):
        (head,) = (s for s in of_rank(spans, rank, SpanKind.HEAD) if s.step == 2)
        (layer,) = (s for s in of_rank(spans, rank, SpanKind.BACKWARD) if (s.step, s.block) == (2, layers[-1]))
        if rank > 0:
            back = [s for s in of_rank(spans, rank, SpanKind.COPY_PARTIAL_IN) if (s.step, s.block) == (2, head.block)]
            middle_s = (head.start_s + head.end_s) / 2
            assert all((s.start_s > middle_s) == (lanes > 1) for s in back)
            assert sum(s.nbytes for s in back) >= 4 * 8 * CHUNK
        if rank == 0:
            # It needs no slots that the next rank has not freed: that one computes its head meanwhile.
            assert layer.start_s == pytest.approx(head.end_s, rel=1e-2)


def test_where_compute_binds_more_ranks_are_faster() -> None:
    seconds = [ranked(num_ranks).steady_step_s() for num_ranks in RANKS]
    for num_ranks, step_s in zip(RANKS, seconds, strict=True):
        largest_group = -(-NUM_MICROBATCHES // num_ranks)
        bound_s = (2 * NUM_BLOCKS - 1) * largest_group
        # A rank begins its backward pass at most one block after the rank before; copies and updates come to it.
        assert bound_s <= step_s <= bound_s + (num_ranks - 1) * largest_group + 2.0
    assert seconds == sorted(seconds, reverse=True)


def test_where_the_ssds_bind_more_ranks_are_as_fast() -> None:
    slow = rates(ssd_read_bytes=(1e4, 1e4), ssd_write_bytes=(1e4, 1e4))
    seconds = [
        replace(found, work=replace(found.work, compute_s=dict.fromkeys(found.work.compute_s, 1e-3))).steady_step_s()
        for found in (ranked(num_ranks, machine=slow) for num_ranks in RANKS)
    ]
    assert seconds == [pytest.approx(seconds[0], rel=0.05)] * len(RANKS)


def test_ranks_without_a_group_compute_nothing() -> None:
    spans = ranked(3, 2, training={"num_microbatches": 4}).spans()
    counts = Counter(span.resource for span in spans if span.kind is SpanKind.FORWARD)
    assert counts["gpu-0/compute"] == counts["gpu-1/compute"] > 0
    assert "gpu-2/compute" not in counts


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_memory_is_that_of_the_plan_and_of_one_device(num_ranks: int) -> None:
    found = ranked(num_ranks)
    levels = found.steps()[-1].levels
    in_host = sum(level.allocated_nbytes or 0 for level in levels if level.tier is MemoryTier.HOST)
    assert in_host == found.context.plan.arena_nbytes
    (params,) = (level for level in levels if level.tier is MemoryTier.DEVICE and level.what == "params")
    assert params.allocated_nbytes == 2 * 2 * 2 * CHUNK  # two buffers of a block
