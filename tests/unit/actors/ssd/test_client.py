"""Requests to SSD servers, and the callbacks that get the answers."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.job.context import JobContext, make_context
from windlass.actors.messages import (
    ActivationIoDone,
    ChunkIo,
    ChunkIoDone,
    ChunkPart,
    Message,
    ReadActivations,
    ReadChunks,
    SsdRequest,
    WriteActivations,
    WriteChunks,
)
from windlass.actors.ssd import client as ssd_client
from windlass.actors.ssd.client import SsdClient
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, Span, StateKind, Step


class Bench:
    def __init__(self, directory: Path) -> None:
        self.context: JobContext = make_context(make_spec(), make_layout(3000, 5000), str(directory / "arena"))
        self.sent: list[tuple[ActorName, Any]] = []
        self.client = SsdClient(ActorName("optimizer-0"), self.context, self._send)
        keys = [key for block in (0, 1) for key in self.context.layout.chunk_keys(BlockIndex(block))]
        self.items = [ChunkIo(key, (ChunkPart(StateKind.PARAM, Span(0, 4096)),)) for key in keys]
        self.done: list[ChunkKey] = []

    def _send(self, to: ActorName, message: Message) -> None:
        assert isinstance(message, SsdRequest)
        self.sent.append((to, message))

    def answer(self, request: ReadChunks | WriteChunks, key: ChunkKey) -> None:
        self.client.take(ChunkIoDone(job=request.job, step=request.step, correlation=request.correlation, key=key))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_each_ssd_gets_one_request_for_its_chunks(bench: Bench) -> None:
    bench.client.read(bench.items, Step(4), (5, 1), bench.done.append)
    assert [to for to, _ in bench.sent] == ["ssd-0", "ssd-1"]
    for to, request in bench.sent:
        assert isinstance(request, ReadChunks)
        assert {f"ssd-{bench.context.geometry(0).ssd_of(item.key)}" for item in request.items} == {to}
        assert (request.step, request.priority, request.reply_to) == (4, (5, 1), "optimizer-0")
    assert sorted(item.key for _, request in bench.sent for item in request.items) == [i.key for i in bench.items]


def test_client_calls_back_for_each_chunk_as_it_arrives(bench: Bench) -> None:
    bench.client.write(bench.items, Step(4), (4, 0), bench.done.append)
    requests = [request for _, request in bench.sent]
    assert all(isinstance(request, WriteChunks) for request in requests)
    moved = [(request, item.key) for request in reversed(requests) for item in reversed(request.items)]
    for i, (request, key) in enumerate(moved, start=1):
        bench.answer(request, key)
        assert bench.done == [key for _, key in moved[:i]]


def test_an_answer_is_that_of_its_request(bench: Bench) -> None:
    others: list[ChunkKey] = []
    bench.client.read(bench.items[:1], Step(4), (5, 1), bench.done.append)
    bench.client.read(bench.items[:1], Step(5), (6, 1), others.append)
    bench.answer(bench.sent[1][1], bench.items[0].key)
    assert (len(bench.done), len(others)) == (0, 1)


def test_client_describes_oldest_request_of_each_ssd_server(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 50.0
    monkeypatch.setattr(ssd_client.time, "monotonic", lambda: now_s)
    assert bench.client.describe_pending() == ""
    bench.client.read(bench.items[:2], Step(4), (5, 1), bench.done.append)
    now_s = 59.0
    bench.client.write(bench.items[2:3], Step(5), (5, 1), bench.done.append)
    now_s = 60.0
    late = "has not finished a read of block 0, chunk"
    first, second = (f"ssd-{i} {late} {i}, step 4 after 10.0 s: check its SSD" for i in (0, 1))
    # The oldest request does not show which server hangs: both are named.
    assert bench.client.describe_pending() == f"{first}; {second}"
    bench.answer(bench.sent[0][1], bench.items[0].key)
    then = "ssd-0 has not finished a write of block 1, chunk 0, step 5 after 1.0 s: check its SSD"
    assert bench.client.describe_pending() == f"{second}; {then}"
    bench.answer(bench.sent[1][1], bench.items[1].key)
    assert bench.client.describe_pending() == then


def test_client_calls_back_once_for_activations_and_describes_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, done = 50.0, list[str]()
    monkeypatch.setattr(ssd_client.time, "monotonic", lambda: now_s)
    bench.client.read(bench.items[:1], Step(4), (5, 1), bench.done.append)
    facts: dict[str, Any] = {
        "step": Step(4),
        "block": BlockIndex(2),
        "slots": (3, 1),
        "span": Span(0, 8192),
        "priority": (3, 7),
    }
    for kind, ssd in ((WriteActivations, 1), (ReadActivations, 0)):
        bench.client.move_activations(kind, ssd, **facts, on_done=lambda kind=kind: done.append(kind.__name__))
    now_s = 52.0
    (_, chunk), *requests = bench.sent
    assert [(to, type(request)) for to, request in requests] == [
        ("ssd-1", WriteActivations),
        ("ssd-0", ReadActivations),
    ]
    for _, request in requests:
        assert {name: getattr(request, name) for name in facts} == facts
        assert request.reply_to == "optimizer-0"
    late = "has not finished a {} of activations of block 2, step 4 after 2.0 s: check its SSD"
    bench.answer(chunk, bench.items[0].key)
    assert bench.client.describe_pending() == f"ssd-1 {late.format('write')}; ssd-0 {late.format('read')}"
    for _, request in requests:
        bench.client.take(ActivationIoDone(job=request.job, step=request.step, correlation=request.correlation))
    assert done == ["WriteActivations", "ReadActivations"]
    assert bench.client.describe_pending() == ""


def test_second_answer_for_a_chunk_is_refused(bench: Bench) -> None:
    bench.client.read(bench.items[:1], Step(4), (5, 1), bench.done.append)
    request = bench.sent[0][1]
    bench.answer(request, bench.items[0].key)
    with pytest.raises(KeyError):
        bench.answer(request, bench.items[0].key)


def test_an_answer_that_comes_before_the_request_is_sent_off_counts(bench: Bench) -> None:
    """The SSD server's thread may be faster than the sender's."""

    def answer_at_once(to: ActorName, message: Message) -> None:
        assert isinstance(message, ReadChunks)
        for item in message.items:
            bench.answer(message, item.key)

    bench.client = SsdClient(ActorName("optimizer-0"), bench.context, answer_at_once)
    bench.client.read(bench.items, Step(4), (5, 1), bench.done.append)
    assert sorted(bench.done) == [item.key for item in bench.items]
    assert bench.client.describe_pending() == ""
