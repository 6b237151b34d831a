"""A real job's timeline: its spans cover the step, and their bytes are those that the SSD servers counted."""

import statistics
import time
from collections import Counter, defaultdict
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import has_direct_io, journal_of, make_partition, make_spec
from windlass.actors.job.context import make_context
from windlass.actors.messages import Message, SpanKind, SpansReported, StoreCommitted, WorkSpan
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.timeline.recorder import COMPUTE, FROM_DEVICE, TO_DEVICE
from windlass.actors.timeline.span_files import FOLDER, KEPT_STEPS, held_steps, load_step
from windlass.actors.timeline.stalls import Stall
from windlass.engine.activations import host_store as activations_host
from windlass.engine.device.device import copy
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.model.layout import ModelLayout
from windlass.storage.ids import ActorName, BlockIndex, ChunkIndex, ChunkKey, Precision

NUM_STEPS = 10
HUGE_PAGE_NBYTES = 2 << 20  # the last page may not be full
READS = (SpanKind.READ_PARAMS, SpanKind.READ_STATES, SpanKind.READ_GRAD)
WRITES = (SpanKind.WRITE_STATES, SpanKind.WRITE_GRAD)


class Run:
    """A trained job, and all reports of its actors about their time."""

    def __init__(self, root: Path, **changes: Any) -> None:
        spec = make_spec(root, total_steps=NUM_STEPS, evaluate_every=None, num_validation_examples=0, **changes)
        partition = make_partition(spec)
        self.spec = spec
        self.layout: ModelLayout = partition.layout
        self.spans: list[WorkSpan] = []
        self.num_told: Counter[ActorName] = Counter()
        self.committed: dict[ActorName, StoreCommitted] = {}
        self.spans_at_commit: dict[ActorName, list[WorkSpan]] = {}
        outcome = run_local(spec, partition=partition, direct=has_direct_io(root), on_message=self._look)
        assert outcome["status"] == "succeeded", outcome

    def _look(self, to: ActorName, message: Message) -> None:
        if isinstance(message, SpansReported):
            assert to == "scheduler"
            self.spans += message.spans
            self.num_told[message.actor] += 1
        elif isinstance(message, StoreCommitted):
            self.committed[message.actor] = message
            self.spans_at_commit[message.actor] = [span for span in self.spans if span.resource == message.actor]

    @property
    def folder(self) -> Path:
        return Path(self.spec.job_dir) / FOLDER

    def summaries(self) -> dict[int, dict[str, Any]]:
        return {
            record.data["step"]: record.data["timeline"]
            for record in journal_of(self.spec)
            if "timeline" in record.data
        }

    def blocks_of(self, kind: SpanKind, step: int) -> list[int]:
        return sorted(span.block for span in self.spans if span.kind is kind and span.step == step)


@pytest.fixture(scope="module", params=[None, 1.0], ids=["active", "kept"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"), clip_norm=request.param)


@pytest.mark.short("active")
def test_every_operation_and_update_is_told_once(run: Run) -> None:
    layout, head = run.layout, len(run.layout.blocks) - 1
    per_chunk = sorted(key.block for block in layout.blocks for key in layout.chunk_keys(block.index))
    for step in range(1, NUM_STEPS + 1):
        assert run.blocks_of(SpanKind.FORWARD, step) == list(range(head))
        assert run.blocks_of(SpanKind.HEAD, step) == [head]
        assert run.blocks_of(SpanKind.BACKWARD, step) == list(range(head))
        for kind in (SpanKind.COPY_GRAD_OUT, SpanKind.UPDATE, SpanKind.WRITE_STATES):
            assert run.blocks_of(kind, step) == per_chunk
        assert run.blocks_of(SpanKind.COMMIT, step) == [-1] * len(run.spec.ssd_dirs)
    assert len(set(run.spans)) == len(run.spans)


def test_bytes_are_those_that_the_ssd_servers_counted(run: Run) -> None:
    assert sorted(run.committed) == ["ssd-0", "ssd-1"]
    for actor, committed in run.committed.items():
        assert committed.step == NUM_STEPS  # no other transfer is in flight
        moved: Counter[SpanKind] = Counter()
        for span in run.spans_at_commit[actor]:
            moved[span.kind] += span.nbytes
        assert sum(moved[kind] for kind in READS) == committed.bytes_read > 0
        assert sum(moved[kind] for kind in WRITES) == committed.bytes_written > 0


def test_compute_is_covered_from_the_first_operation_to_the_last(run: Run) -> None:
    """The worker computes, waits, or switches between the two: little time is in no span."""
    compute = sorted((span.start_s, span.end_s) for span in run.spans if span.resource == COMPUTE)
    for before, after in pairwise(compute):
        assert before[1] <= after[0]  # one thread
    for step, summary in run.summaries().items():
        told_s = summary["busy_s"][COMPUTE] + sum(summary["stall_s"].values())
        assert told_s == pytest.approx(summary["period_s"], abs=1e-4), step


def test_each_steps_metrics_have_a_summary(run: Run) -> None:
    summaries = run.summaries()
    assert list(summaries) == list(range(1, NUM_STEPS + 1))
    for step, summary in summaries.items():
        resources = {COMPUTE, TO_DEVICE, FROM_DEVICE, "optimizer-0", "ssd-0", "ssd-1"}
        assert all(0 <= seconds <= summary["period_s"] for seconds in summary["busy_s"].values())
        # The period of the first step may have no update yet.
        assert step == 1 or {name for name, seconds in summary["busy_s"].items() if seconds} == resources
        busiest_s = max(summary["busy_s"].values())
        assert summary["overlap_efficiency"] == pytest.approx(busiest_s / summary["period_s"], abs=1e-3)
        assert summary["busy_s"][summary["busiest"]] == busiest_s
        assert summary["dependency_bound_s"] > 0
    # Periods follow each other: together they are the time from the first one's start to the last one's end.
    first, last = (load_step(run.folder, step) for step in (NUM_STEPS - KEPT_STEPS + 1, NUM_STEPS))
    assert first is not None
    assert last is not None
    total_s = sum(summaries[step]["period_s"] for step in range(first.step, NUM_STEPS + 1))
    assert total_s == pytest.approx(last.end_s - first.start_s, abs=1e-4)


def test_the_last_steps_are_held(run: Run) -> None:
    assert held_steps(run.folder) == list(range(NUM_STEPS - KEPT_STEPS + 1, NUM_STEPS + 1))
    kept = load_step(run.folder, NUM_STEPS)
    assert kept is not None
    assert kept.summary == run.summaries()[NUM_STEPS]
    assert set(kept.spans) <= set(run.spans)
    of_step = {(span.kind, span.block, span.chunk) for span in kept.spans if span.step == NUM_STEPS}
    assert {kind for kind, _, _ in of_step} >= {SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.UPDATE}


def test_spans_are_told_about_once_a_step(run: Run) -> None:
    head = len(run.layout.blocks) - 1
    assert run.num_told["optimizer-0"] == NUM_STEPS
    # and one more for transfers from the device afterwards
    assert NUM_STEPS <= run.num_told["gpu-0"] <= NUM_STEPS * (2 + head)
    # With each commit, once at the end, and every second.
    assert run.num_told["ssd-0"] >= NUM_STEPS + 1


@pytest.mark.long
def test_timeline_of_resident_states_and_spilled_gradients(tmp_path: Path) -> None:
    placement = Placement(host_blocks=(0, 1), device_blocks=(2, 3))
    resting = Run(tmp_path / "resting", precision=Precision.BF16, placement=placement)
    on_device = [span for span in resting.spans if span.kind is SpanKind.UPDATE and span.resource == COMPUTE]
    assert Counter(span.block for span in on_device) == {2: NUM_STEPS, 3: NUM_STEPS}
    flushed = [span for span in resting.spans if span.kind is SpanKind.COPY_STATES_OUT]
    keys = {(span.block, span.chunk) for span in flushed}
    assert keys == {(key.block, key.chunk) for block in (2, 3) for key in resting.layout.chunk_keys(BlockIndex(block))}
    for span in flushed:  # with the params, although only their master is resident
        start, stop = resting.layout.chunk_range(ChunkKey(BlockIndex(span.block), ChunkIndex(span.chunk)))
        assert span.nbytes == 14 * (stop - start)
    assert list(resting.summaries()) == list(range(1, NUM_STEPS + 1))

    spilling = Run(tmp_path / "spilling", clip_norm=1.0, placement=Placement(num_host_grad_blocks=0))
    moved: dict[SpanKind, int] = defaultdict(int)
    for span in spilling.spans:
        moved[span.kind] += span.nbytes
    assert moved[SpanKind.WRITE_GRAD] == moved[SpanKind.READ_GRAD] > 0


@pytest.mark.long
@pytest.mark.usefixtures("small_activation_slots")
def test_timeline_of_swapped_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(0.002)  # longer than the previous block takes to compute
        copy(target, source)

    monkeypatch.setattr(activations_host, "copy", slowly)
    swap = ActivationChoice.SWAP.of_layers(3)
    run = Run(tmp_path, placement=Placement(activations=swap, host_activation_nbytes=4 << 20))
    for resource, kind in ((FROM_DEVICE, SpanKind.COPY_ACTIVATIONS_OUT), (TO_DEVICE, SpanKind.COPY_ACTIVATIONS_IN)):
        spans = [span for span in run.spans if span.kind is kind]
        assert {span.resource for span in spans} == {resource}
        assert all(span.nbytes > 0 for span in spans)
        assert {(span.step, span.block) for span in spans} == set(product(range(1, NUM_STEPS + 1), (1, 2, 3)))
    operations = {(span.step, span.block): span for span in run.spans if span.kind is SpanKind.BACKWARD}
    waits = [span for span in run.spans if span.kind is SpanKind.WAIT_ACTIVATIONS]
    assert waits
    for wait in waits:
        operation = operations[wait.step, wait.block]
        assert operation.start_s <= wait.start_s <= wait.end_s <= operation.end_s
    for step, summary in run.summaries().items():
        told_s = summary["busy_s"][COMPUTE] + sum(summary["stall_s"].values())
        assert told_s == pytest.approx(summary["period_s"], abs=1e-4), step
    assert sum(summary["stall_s"].get(Stall.ACTIVATIONS, 0.0) for summary in run.summaries().values()) > 0


def test_a_disk_that_takes_no_timeline_does_not_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, kept: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("windlass.actors.scheduler.progress.keep_step", refuse)
    run = Run(tmp_path)
    assert list(run.summaries()) == list(range(1, NUM_STEPS + 1))
    told = [record for record in journal_of(run.spec) if "Timelines are no longer written" in record.message]
    assert [record.level for record in told] == ["warn"]
    assert "No space left" in told[0].message


def test_resource_usage_is_reported_with_each_step(run: Run) -> None:
    """Space in the arena and on the SSDs is taken at the start; memory of the device as steps need it."""
    measured = [record.data["measured"] for record in journal_of(run.spec) if "measured" in record.data]
    assert [each["num_steps"] for each in measured] == [0, 0, *range(1, NUM_STEPS - 1)]
    assert measured[1]["step_s"] is None
    periods = [summary["period_s"] for summary in run.summaries().values()]
    assert measured[-1]["step_s"] == pytest.approx(statistics.fmean(periods[2:]), abs=1e-5)
    peaks = [each["peak_bytes"] for each in measured]
    assert all(set(each) == {"gpu", "host", "ssd"} for each in peaks)
    plan = make_context(run.spec, run.layout, "").plan
    assert all(plan.arena_nbytes <= each["host"] <= plan.arena_nbytes + HUGE_PAGE_NBYTES for each in peaks)
    # An extent is rounded up to 4096 bytes for each state, and an area has a header.
    assert all(plan.ssd_nbytes <= each["ssd"] < plan.ssd_nbytes + (64 << 20) for each in peaks)
    assert [each["gpu"] for each in peaks] == sorted(each["gpu"] for each in peaks)
    assert peaks[-1]["gpu"] > 0
