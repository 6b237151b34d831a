"""Simulated jobs end, resources do one task at a time, nothing is early, and step times add up."""

import itertools
from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.actors.specs import make_layout, make_spec
from tests.support.examples import examples
from tests.support.planner.simulated import CHUNK, Simulated, job, layers_of, moved, rates, run
from windlass.actors.job.context import make_context
from windlass.actors.messages import Phase, SpanKind, WorkSpan
from windlass.actors.scheduler.scheduler import job_shape
from windlass.actors.timeline.span_files import StepSpans
from windlass.actors.worker_policy.block_queue import Ordering, QueueOrder
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.engine.memory_plan.plan import Placement
from windlass.planner.simulation import simulate as simulate_module
from windlass.planner.simulation.job import Pending, SimulatedJob
from windlass.planner.simulation.simulate import Work, simulate, steady_step_s
from windlass.storage.ids import BlockIndex


def test_where_all_else_is_fast_a_step_is_its_compute() -> None:
    steps = run()
    assert len(steps) == 4
    for step in steps[1:]:
        assert step.summary["period_s"] == pytest.approx(11.0, rel=1e-6)
        assert step.summary["overlap_efficiency"] == pytest.approx(1.0, abs=1e-6)


def test_where_the_ssds_are_slow_a_step_is_its_bytes() -> None:
    slow = rates(ssd_read_bytes=(1e4, 1e4), ssd_write_bytes=(1e4, 1e4))
    step = run(num_steps=8, machine=slow, compute_s=1e-3)[5]
    nbytes = sum(step.summary["moved_bytes"][name] for name in ("ssd-0", "ssd-1"))
    # Master and moments in, these and the params out; the params in once or twice.
    assert 26 * 6 * 2 * CHUNK <= nbytes <= 30 * 6 * 2 * CHUNK
    assert step.summary["period_s"] == pytest.approx(nbytes / 2e4, rel=0.1)
    assert step.summary["busiest"].startswith("ssd-")


def test_where_the_optimizer_is_slow_priority_beats_arrival() -> None:
    # As long as the compute: the next forward pass can begin under the updates, if its blocks are updated first.
    slow = rates(optimizer_params=24 * 2 * CHUNK / 47.0)

    def period_s(queues: QueueOrder) -> float:
        ordering = Ordering(queues=queues)
        return float(run(num_blocks=24, machine=slow, ordering=ordering)[-1].summary["period_s"])

    assert period_s(QueueOrder.PRIORITY) < period_s(QueueOrder.FIFO) * 0.9


def test_a_steady_step_is_found_without_timelines() -> None:
    slow = rates(optimizer_params=12 * 2 * CHUNK / 9.0, ssd_read_bytes=(1e5, 1e5), ssd_write_bytes=(1e5, 1e5))
    found = job(num_blocks=12, machine=slow, num_steps=8)
    steps = found.steps()
    assert found.steady_step_s() == pytest.approx(steps[5].summary["period_s"], rel=0.02)


def test_steady_step_with_other_numbers_of_waiting_requests_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that differs by one is another number, however long the steps are."""
    periods_s = iter((9e4, 3e4, 2e4, 2e4, 1e9))

    class Job:
        """A job with five requests after the first step, and four after each further one."""

        def __init__(self, *_: object, **__: object) -> None:
            self._num_waiting = 6

        def next_period_s(self, *, max_calls: int | None, most_s: float) -> float:
            self._num_waiting = max(4, self._num_waiting - 1)
            return next(periods_s)

        @property
        def pending(self) -> Pending:
            return Pending(nums_waiting=(self._num_waiting, 0), calls_s=(1.0,))

    monkeypatch.setattr(simulate_module, "SimulatedJob", Job)
    assert job().steady_step_s() == 2e4


def test_a_long_step_after_a_short_one_ends_no_simulation_whose_mean_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Job:
        """A job whose steps alternate: one of 0.97 s, one of 1.03 s."""

        def __init__(self, *_: object, **__: object) -> None:
            self._num_steps = 0

        def next_period_s(self, *, max_calls: int | None, most_s: float) -> float:
            self._num_steps += 1
            return 1.03 if self._num_steps > 1 and self._num_steps % 2 else 0.97

        @property
        def pending(self) -> Pending:
            return Pending(nums_waiting=(self._num_steps,), calls_s=())

    monkeypatch.setattr(simulate_module, "SimulatedJob", Job)
    found = job()
    whole_s = found.steady_step_s()
    assert whole_s == pytest.approx(1.0)
    assert steady_step_s(found.context, found.shape, found.machine, found.work, most_s=1.01) == whole_s
    assert steady_step_s(found.context, found.shape, found.machine, found.work, most_s=0.99) > 0.99


def test_a_step_that_is_too_long_is_not_simulated_to_its_end() -> None:
    """The rest of a step takes as long as in the step before, which had no updates in its way."""
    # Updates are slower than the forward pass, which waits for them from the second step on.
    slow = rates(optimizer_params=24 * 2 * CHUNK / 40.0)
    found = job(num_blocks=24, num_steps=8, machine=slow, training={"clip_norm": 1.0})

    def begun() -> SimulatedJob:
        return SimulatedJob(found.context, found.shape, found.machine, found.work, keeps_spans=False)

    whole = begun()
    first_s, second_s = whole.next_period_s(), whole.next_period_s()
    assert first_s < 0.8 * second_s

    early = begun()
    assert first_s / 2 < early.next_period_s(most_s=first_s / 2) <= first_s
    assert early.clock.now < 0.6 * first_s

    later, most_s = begun(), 0.99 * second_s
    assert later.next_period_s(most_s=most_s) == first_s
    assert most_s < later.next_period_s(most_s=most_s) <= second_s * (1 + 1e-9)
    assert first_s + second_s / 2 < later.clock.now < first_s + 0.7 * second_s  # at the end of the forward pass

    assert begun().next_period_s(most_s=first_s) == first_s
    for limit_s in (0.5 * first_s, most_s):
        assert steady_step_s(found.context, found.shape, found.machine, found.work, most_s=limit_s) > limit_s
    assert steady_step_s(
        found.context, found.shape, found.machine, found.work, most_s=1.01 * second_s
    ) == pytest.approx(found.steady_step_s())


def test_without_overlap_updates_follow_the_backward_pass_and_nothing_else() -> None:
    slow = rates(optimizer_params=2 * CHUNK)  # one second a block
    hyper = {"clip_norm": 1.0}
    alone = run(machine=slow, training=hyper, ordering=Ordering(overlaps_steps=False))[-1]
    assert alone.summary["period_s"] == pytest.approx(11.0 + 6.0, rel=1e-3)
    beside = run(machine=slow, training=hyper)[-1]
    # Each block's forward operation follows its update. Three chunks may begin before the last gradient arrives, which
    # is that of the first block.
    assert 11.0 + 1.0 - 1e-3 <= beside.summary["period_s"] <= 11.0 + 1.0 + 1.5 + 1e-3


def test_device_states_move_only_for_commits() -> None:
    everything = Placement(device_blocks=tuple(range(6)), commit_every=100)
    step = run(placement=everything)[1]
    assert step.summary["moved_bytes"] == {}
    assert {name for name, busy_s in step.summary["busy_s"].items() if busy_s} == {"gpu-0/compute"}


def test_device_states_are_copied_out_and_written_at_a_commit() -> None:
    everything = Placement(device_blocks=tuple(range(6)), commit_every=2)
    slow = rates(ssd_write_bytes=(1e4, 1e4), d2h_bytes=1e5)
    steps = run(placement=everything, machine=slow, num_steps=6)
    by_resource = [step.summary["moved_bytes"] for step in steps]
    written = [each.get("ssd-0", 0) + each.get("ssd-1", 0) for each in by_resource]
    # The states of step 2 are written from step 3 on, and those of step 4 from step 5 on; those of step 6 after all
    # steps.
    assert sum(written) == 2 * 14 * 6 * 2 * CHUNK
    assert written[:2] == [0, 0]
    # An update waits for earlier flushes.
    assert steps[2].summary["period_s"] > steps[1].summary["period_s"] + 1.0


def test_params_rounded_from_a_master_on_the_device_are_copied_out_with_it() -> None:
    spans = job(placement=Placement(device_blocks=tuple(range(6)), commit_every=2), num_steps=6).spans()
    nbytes = [moved(spans, kind) for kind in (SpanKind.COPY_STATES_OUT, SpanKind.WRITE_STATES)]
    assert nbytes == [3 * 14 * 6 * 2 * CHUNK] * 2


def test_rates_are_needed_for_every_ssd() -> None:
    with pytest.raises(ValueError, match="2 SSDs; rates are given for 1"):
        run(machine=rates(ssd_read_bytes=(1.0,)))


def test_validation_is_left_out() -> None:
    assert len(run(num_validation_examples=3, evaluate_every=1)) == 4


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_a_tied_head_brings_the_embedding_too(num_optimizers: int) -> None:
    layout = make_layout(*[CHUNK] * 4, chunk_numel=CHUNK)
    tied = replace(layout, shared=(*layout.shared[:-1], (BlockIndex(3), BlockIndex(0))))
    context = make_context(make_spec(total_steps=2, num_cpu_optimizers=num_optimizers), tied, "")
    work = Work(compute_s={(phase, block): 1.0 for phase in Phase for block in range(4)})
    steps = simulate(context, job_shape(context, ""), rates(h2d_bytes=CHUNK * 2), work)
    copied = [span for span in steps[1].spans if span.kind is SpanKind.COPY_PARAMS_IN and span.block == 0]
    assert len(copied) == 2  # for forward and for the head, after which backward finds it


# A placement for each tier; the last one is for jobs that keep their gradients.
TIERS = {
    "SSDs": Placement(num_cached_params=0),
    "params stay": Placement(num_cached_params=7),
    "host memory": Placement(host_blocks=(0, 1, 4), commit_every=2),
    "device": Placement(device_blocks=(0, 3), host_blocks=(1,), commit_every=3),
    "gradients on SSDs": Placement(num_host_grad_blocks=1, num_cached_params=2),
}
# Slots in host memory and on the SSDs. Three layers with two tensors use 24 for four micro-batches.
ROOM = {"nothing": None, "host": (24, 0), "host and SSDs": (7, 17), "SSDs": (0, 24)}
TENSORS = (3000, 4096)
NUM_BLOCKS = 5
LAYERS = range(1, NUM_BLOCKS - 1)


def featured(
    placement: Placement, *, group_size: int, swaps: str, streams: bool, clips: bool, **options: Any
) -> Simulated:
    """A job of four micro-batches with the given features."""
    placement, room = replace(placement, group_size=group_size), ROOM[swaps]
    if room is not None:
        placement = replace(
            placement,
            activations=ActivationChoice.SWAP.of_layers(1) + ActivationChoice.RECOMPUTE_SWAP_INPUT.of_layers(2),
            host_activation_nbytes=room[0] * 4096,
            ssd_activation_nbytes=room[1] * 4096,
        )
    if streams:
        placement = replace(placement, streamed_blocks=tuple(set(LAYERS) - set(placement.device_blocks)))
    return job(
        layout=layers_of((3000, 3000), (4000,), (3000,), num_norms=100, num_blocks=NUM_BLOCKS),
        placement=placement,
        swapped_nbytes={} if room is None else dict.fromkeys(LAYERS, TENSORS),
        training={"num_microbatches": 4, "clip_norm": 1.0 if clips else None},
        **options,
    )


@pytest.mark.short("True-host and SSDs-*", "False-SSDs-*")
@pytest.mark.usefixtures("small_activation_slots")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("swaps", ROOM)
@pytest.mark.parametrize("streams", [False, True])
def test_every_combination_ends(tier: str, swaps: str, streams: bool) -> None:
    slow = rates(h2d_bytes=1e5, d2h_bytes=1e5, ssd_read_bytes=(1e5, 1e5), ssd_write_bytes=(1e5, 1e5))
    for group_size, clips in product((4, 2, 1), (False, True)):
        if clips or tier != "gradients on SSDs":
            features = {"group_size": group_size, "swaps": swaps, "streams": streams, "clips": clips}
            assert len(featured(TIERS[tier], **features, num_steps=2, machine=slow, compute_s=0.1).steps()) == 2


PLACEMENTS = st.builds(
    Placement,
    host_blocks=st.sets(st.integers(0, 2)).map(lambda blocks: tuple(sorted(blocks))),
    device_blocks=st.sets(st.integers(3, 4)).map(lambda blocks: tuple(sorted(blocks))),
    num_cached_params=st.one_of(st.none(), st.integers(0, 8)),
    commit_every=st.one_of(st.none(), st.integers(1, 3)),
)
SPILLED = st.builds(Placement, num_host_grad_blocks=st.integers(0, 4), num_cached_params=st.integers(0, 4))
SECONDS = st.sampled_from([0.0, 0.3, 1.0, 5.0])


@pytest.mark.usefixtures("small_activation_slots")
# The slot size is the same in all jobs of a test.
@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_job_ends_and_keeps_the_order_of_things(data: st.DataObject) -> None:
    spills = data.draw(st.booleans())
    ordering = data.draw(
        st.builds(
            Ordering,
            queues=st.sampled_from(QueueOrder),
            overlaps_steps=st.booleans(),
            max_prefetched=st.integers(1, 4),
            max_offloading=st.integers(1, 3),
            max_updating=st.sampled_from([1, 2, 1024]),
        )
    )
    chunk_s = CHUNK / 10
    machine = rates(
        h2d_bytes=2 * CHUNK / (data.draw(SECONDS) + 1e-9),
        d2h_bytes=4 * CHUNK / (data.draw(SECONDS) + 1e-9),
        ssd_read_bytes=(chunk_s, 2 * chunk_s),
        ssd_write_bytes=(chunk_s, 3 * chunk_s),
        optimizer_params=CHUNK / (data.draw(SECONDS) + 1e-9),
        message_s=data.draw(st.sampled_from([0.0, 0.01])),
        commit_s=data.draw(SECONDS),
        launches_ahead=data.draw(st.booleans()),
    )
    num_ranks = data.draw(st.integers(1, 4))
    placement = data.draw(SPILLED if spills else PLACEMENTS)
    if num_ranks > 1:  # then no states are resident on a device
        placement = replace(placement, device_blocks=())
    steps = featured(
        placement,
        num_ranks=num_ranks,
        group_size=data.draw(st.integers(1, -(-4 // num_ranks))),
        swaps=data.draw(st.sampled_from(sorted(ROOM))),
        streams=data.draw(st.booleans()),
        clips=spills or data.draw(st.booleans()),
        num_steps=3,
        machine=machine,
        compute_s=data.draw(SECONDS),
        ordering=ordering,
    ).steps()
    assert len(steps) == 3
    spans = list(dict.fromkeys(span for step in steps for span in step.spans))
    _one_at_a_time(spans)
    _no_block_is_computed_before_its_update(spans, num_blocks=NUM_BLOCKS)
    _memory_is_what_is_allocated(steps)


def _one_at_a_time(spans: list[WorkSpan]) -> None:
    by_resource: dict[str, list[WorkSpan]] = defaultdict(list)
    for span in spans:
        # A chunk in transfer to or from an SSD may be overtaken after each piece.
        if not span.kind.startswith("wait_") and not span.resource.startswith("ssd-"):
            by_resource[span.resource].append(span)
    for found in by_resource.values():
        found.sort(key=lambda span: (span.start_s, span.end_s))
        for first, second in itertools.pairwise(found):
            assert second.start_s >= first.end_s - 1e-9, (first, second)


def _memory_is_what_is_allocated(steps: list[StepSpans]) -> None:
    for level in (level for step in steps for level in step.levels):
        most = max(nbytes for _, nbytes in level.points)
        assert min(nbytes for _, nbytes in level.points) >= 0, level
        assert most <= (most if level.allocated_nbytes is None else level.allocated_nbytes), level
    for level in steps[-1].levels:  # all is released, except resident states and kept params
        if level.what not in ("states", "params"):
            assert level.points[-1][1] == 0, level
    (stored,) = (level for level in steps[-1].levels if level.tier is MemoryTier.SSD and level.what == "states")
    assert 2 * stored.points[-1][1] == stored.allocated_nbytes


def _no_block_is_computed_before_its_update(spans: list[WorkSpan], *, num_blocks: int) -> None:
    updated: dict[tuple[int, int], float] = {}
    for span in spans:
        if span.kind is SpanKind.UPDATE:
            key = (span.step, span.block)
            updated[key] = max(updated.get(key, 0.0), span.end_s)
    forward = [span for span in spans if span.kind in (SpanKind.FORWARD, SpanKind.HEAD) and span.step > 1]
    assert {span.block for span in forward} == set(range(num_blocks))
    for span in forward:
        assert span.start_s >= updated[(span.step - 1, span.block)] - 1e-9
