"""The figures that `benchmarks.dispatch` makes of its measurements, and its counts of messages."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.dispatch.benchmark import (
    Commit,
    Plan,
    RunFiles,
    Samples,
    add_tables,
    commits_of,
    compute_s_of,
    contenders_of,
    figures_of,
    plan_of,
)
from benchmarks.dispatch.message_counts import COUNTS_FOLDER, WRITES, CountedClient, read_counts
from benchmarks.peers.contenders import ContenderRun
from benchmarks.peers.windlass_runner import placement_of
from benchmarks.reporting.report import Report
from benchmarks.step import contenders
from windlass.actors.job import Journal
from windlass.actors.job.journal import METRICS
from windlass.actors.messages import BlockUpdated, LoadModel, Message, SpanKind, WorkSpan
from windlass.actors.runtime.sockets import MessageServer
from windlass.actors.timeline.recorder import COMPUTE
from windlass.actors.timeline.span_files import StepSpans, keep_step
from windlass.storage.ids import ActorName, BlockIndex, JobId, Step


def span(kind: SpanKind, step: int, start_s: float, end_s: float, resource: str = "ssd-0") -> WorkSpan:
    return WorkSpan(resource, kind, step, 0, 0, start_s, end_s, 0)


SPANS = (
    span(SpanKind.UPDATE, 3, 1.0, 2.0),
    span(SpanKind.UPDATE, 3, 4.0, 5.0),
    span(SpanKind.UPDATE, 3, 3.0, 4.5),
    span(SpanKind.WRITE_STATES, 3, 5.0, 6.0),
    span(SpanKind.COMMIT, 3, 6.0, 7.0),
    span(SpanKind.COMMIT, 3, 6.0, 8.5, "ssd-1"),
    span(SpanKind.UPDATE, 4, 6.0, 9.0),  # of a step without a commit
)


def test_commits_of_spans_lasts_from_the_last_update_to_the_last_server() -> None:
    assert commits_of(SPANS, range(3, 5)) == [Commit(after_update_s=3.5, store_s=2.5)]
    assert commits_of((*SPANS, *SPANS), [3]) == commits_of(SPANS, [3])  # neighboring files share spans
    assert commits_of(SPANS, [4]) == []


def test_figures_are_medians_for_each_layer_block_and_step() -> None:
    samples = Samples(
        step_s=[0.4, 0.2, 9.0],
        control_s=[0.06, 0.12, 0.03],
        messages=[Counter({"A": 60, "B": 60, WRITES: 1000}), Counter({"A": 240}), Counter({"A": 90})],
        commits=[Commit(after_update_s=0.02, store_s=0.01)],
    )
    figures = figures_of(samples, num_layers=4)
    assert figures == pytest.approx(
        {
            "host_ms_per_layer_step": 100.0,
            "control_cpu_ms_per_block_step": 10.0,
            "messages_per_block_step": 20.0,
            "commit_ms": 20.0,
        }
    )
    assert samples.mean_messages() == {"A": 130, "B": 20, WRITES: pytest.approx(1000 / 3)}


def test_tables_of_samples_are_for_each_layer_block_and_step(tmp_path: Path) -> None:
    samples = Samples(
        step_s=[0.4, 0.2, 0.8],
        compute_s=[0.1],
        control_s=[0.06],
        moving_s=[0.012],
        messages=[Counter({"A": 60, WRITES: 30}), Counter({"A": 66, WRITES: 36})],
        commits=[Commit(after_update_s=0.02, store_s=0.01)],
    )
    report = Report("title", tmp_path, {})
    num_lines = len(report.lines)
    add_tables(report, {"plain": Samples(step_s=[0.04]), "device": samples, "host": samples, "ssd": samples}, 4)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.lines[num_lines:]]
    assert ["plain PyTorch, in memory", "10.00 (10.00 to 10.00)", "", "", ""] in rows
    by_name = [row[1:] for row in rows if row[:1] == ["windlass, states on SSD"]]
    assert by_name == [
        ["100.00 (50.00 to 200.00)", "25.00 (25.00 to 25.00)", "10.00 (10.00 to 10.00)", "2.00 (2.00 to 2.00)"],
        ["10.50 (10.00 to 11.00)", "5.50 (5.00 to 6.00)", "20.0 (20.0 to 20.0)", "10.0 (10.0 to 10.0)", "1"],
    ]
    assert ["A", "10.50", "10.50", "10.50"] in rows


def test_compute_s_of_journal_gives_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", 1)
    for step in (1, 2, 3):
        journal.append(METRICS, "", step=step, timeline={"busy_s": {COMPUTE: step / 10}})
    journal.append("message", "no metrics")
    journal.close()
    assert compute_s_of(tmp_path / "journal", range(2, 4)) == [0.2, 0.3]


def message(step: int) -> Message:
    return BlockUpdated(job=JobId("j"), step=Step(step), block=BlockIndex(1), actor=ActorName("optimizer-0"))


@pytest.fixture
def client() -> Iterator[CountedClient]:
    """A client that is connected to a server, which drops what it receives."""
    server = MessageServer(lambda messages: None)
    yield CountedClient({ActorName("scheduler"): server.address})
    server.close()


def test_counted_client_counts_by_kind_and_step(tmp_path: Path, client: CountedClient) -> None:
    scheduler = ActorName("scheduler")
    client.deliver(scheduler, [message(1), message(1), message(2)])
    client.deliver(scheduler, [LoadModel(job=JobId("j"), step=Step(1))])
    client.save(tmp_path, ActorName("optimizer-0"))
    client.save(tmp_path, ActorName("gpu-0"))
    assert read_counts(tmp_path / COUNTS_FOLDER) == {
        1: {"BlockUpdated": 4, "LoadModel": 2, WRITES: 2},
        2: {"BlockUpdated": 2, WRITES: 2},
    }


def test_samples_add_takes_the_steady_steps_of_all_files(tmp_path: Path, client: CountedClient) -> None:
    files = RunFiles("ssd", tmp_path)
    journal = Journal(files.journal, 1)
    for step in (3, 4, 5):
        journal.append(METRICS, "", step=step, timeline={"busy_s": {COMPUTE: float(step)}})
        client.deliver(ActorName("scheduler"), [message(step)] * step)
    journal.close()
    client.save(tmp_path, ActorName("optimizer-0"))
    (tmp_path / COUNTS_FOLDER).rename(files.counts)
    keep_step(files.spans, StepSpans(step=3, start_s=0.0, end_s=9.0, summary={}, spans=SPANS))
    samples = Samples()
    samples.add(ContenderRun(step_s=(3.5, 4.5, 5.5), control_s=1.0, moving_s=2.0), files, range(3, 5))
    assert (samples.step_s, samples.compute_s) == ([3.5, 4.5], [3.0, 4.0])
    assert samples.num_messages() == [3, 4]
    assert samples.commits == [Commit(after_update_s=3.5, store_s=2.5)]


@pytest.mark.parametrize("plan", [plan_of(quick=True), plan_of(quick=False)])
def test_plan_has_commits_of_states_in_memory_among_its_steady_steps(plan: Plan) -> None:
    assert any(step % 10 == 0 for step in plan.steady_steps)
    assert plan.workload.num_steps not in plan.steady_steps


def test_contenders_of_modes_place_all_blocks(tmp_path: Path) -> None:
    plain, *ours = contenders_of(tmp_path)
    assert plain in contenders(tmp_path / "ssd")
    placements = {}
    for contender in ours:
        places = [contender.arguments[i + 1] for i, word in enumerate(contender.arguments) if word == "--place"]
        placement = placement_of(places, 3)
        placements[contender.name] = (placement.device_blocks, placement.host_blocks)
    assert placements == {"device": ((0, 1, 2), ()), "host": ((), (0, 1, 2)), "ssd": ((), ())}
