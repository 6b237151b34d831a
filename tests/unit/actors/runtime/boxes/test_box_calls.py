"""The calls of a job's first box to another one, over a real link, with boxes that only answer."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.actors.specs import make_spec
from tests.unit.actors.parity.boxes.test_linked_stages import ends
from windlass.actors.job import SCHEDULER, JobSpec, gpu_worker_name, link_name, ssd_name
from windlass.actors.messages import (
    ActorFailed,
    Crossing,
    Message,
    OfferSpan,
    Phase,
    PullSpan,
    SpanKind,
    SpanPulled,
    SpansReported,
    UserMessage,
    WorkSpan,
)
from windlass.actors.runtime.boxes import other_boxes
from windlass.actors.runtime.boxes.box_link import BoxLink, LinkEnd
from windlass.actors.runtime.boxes.first_box import BoxFailedError
from windlass.actors.runtime.boxes.other_boxes import REQUESTS, ActorsCalled, AttemptEnded, OtherBoxes, serve_box
from windlass.actors.scheduler import ActorLostError
from windlass.actors.worker_policy.stages import Stage
from windlass.storage.ids import ActorName, BlockIndex, BoxName, ChunkIndex, ChunkKey, Span, Step
from windlass.storage.link import KeyKind, Link, LinkKey
from windlass.storage.store import StoreJournal

_WAIT_S = 20.0
SSD, GPU = ssd_name(0, 1), gpu_worker_name(0, 1)
METHODS = ("plan", "read_journal", "open_space", "start")


class AnsweringBox:
    """A box without processes."""

    free_nbytes = 7 << 30
    context: Any = SimpleNamespace(
        ssds=(), spec=SimpleNamespace(ssd_dirs=("/its/ssd",)), plan=SimpleNamespace(arena_nbytes=4096), layout=None
    )

    def __init__(self, fails_at: str = "", error: Exception | None = None) -> None:
        self._fails_at, self._error = fails_at, error or ValueError(f"no {fails_at} here")
        self.has_died = threading.Event()
        self.calls: list[tuple[tuple[ActorName, ...], str, tuple[object, ...], float]] = []
        self._fail("plan")

    def call(
        self, names: Sequence[ActorName], method: str, *arguments: object, deadline_s: float = 0.0
    ) -> dict[ActorName, Any]:
        self.calls.append((tuple(names), method, arguments, deadline_s))
        self._fail(method)
        answer = StoreJournal(where="there", records=()) if method == "read_journal" else None
        return dict.fromkeys(names, answer)

    def check(self) -> None:
        if self.has_died.is_set():
            raise ActorLostError("the process of b1/gpu-0 died")

    def _fail(self, method: str) -> None:
        if method == self._fails_at:
            raise self._error


class Served:
    """A box in a thread, and what became of it."""

    def __init__(
        self,
        spec: JobSpec,
        end: LinkEnd,
        make_box: Callable[[], AnsweringBox],
        check_ends: list[Callable[[], None]] | None = None,
    ) -> None:
        """`check_ends` gets what the box is to call during its waits."""
        self._check_ends = [] if check_ends is None else check_ends
        self.box: AnsweringBox | None = None
        self.end: AttemptEnded | None = None
        self.error: Exception | None = None
        self._make_box = make_box
        self._link = BoxLink(spec, end, REQUESTS)
        self.thread = threading.Thread(target=self._run, args=(spec,))
        self.thread.start()

    def _run(self, spec: JobSpec) -> None:
        try:
            self.end = serve_box(spec, self._link, self._make)
        except Exception as error:  # noqa: BLE001 - a test looks at it
            self.error = error
        finally:
            self._link.stop()

    def _make(self, check_end: Callable[[], None]) -> Any:
        self._check_ends.append(check_end)
        self.box = self._make_box()
        return self.box

    def join(self) -> None:
        self.thread.join(_WAIT_S)
        assert not self.thread.is_alive()


def specs_of() -> list[JobSpec]:
    spec = replace(make_spec(), stages=(Stage(0, 2), Stage(2, 5)))
    return [replace(spec, box=box) for box in range(2)]


@contextmanager
def two_boxes(root: Path, make_box: Callable[[], AnsweringBox]) -> Iterator[tuple[OtherBoxes, Served]]:
    """The first box's view of the other one, and that one."""
    specs, (here, there) = specs_of(), ends(root / "links", 2)
    with ExitStack() as stack:
        served = Served(specs[1], there, make_box)
        stack.callback(served.join)
        link = BoxLink(specs[0], here, REQUESTS)
        stack.callback(link.stop)
        yield OtherBoxes(link, here.names), served


def call_here(names: Sequence[ActorName], method: str, *arguments: object, deadline_s: float = 0.0) -> dict[Any, Any]:
    return dict.fromkeys(names, f"{method} here")


def start(others: OtherBoxes, specs: Sequence[JobSpec]) -> None:
    others.contexts(specs, SimpleNamespace())  # type: ignore[arg-type]
    for method in METHODS[1:]:
        others.call(call_here, [SSD], method, *((None,) if method == "start" else ()))


@pytest.fixture(autouse=True)
def _same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_boxes, "make_context", lambda *_, **__: AnsweringBox.context)
    monkeypatch.setattr(other_boxes, "digests_of", lambda spec, layout: {"the settings": str(spec.training.seed)})


def test_actors_of_all_boxes_answer_in_the_order_of_the_call(tmp_path: Path) -> None:
    with two_boxes(tmp_path, AnsweringBox) as (others, served):
        others.contexts(specs_of(), SimpleNamespace())  # type: ignore[arg-type]
        answers = others.call(call_here, [SSD, ssd_name(0)], "read_journal")
        assert list(answers.items()) == [
            (SSD, StoreJournal(where="there", records=())),
            (ssd_name(0), "read_journal here"),
        ]
        assert others.call(call_here, [GPU], "start", None, deadline_s=77.0) == {GPU: None}
        others.end(is_over=True, in_order=True)
        served.join()
        assert served.end == AttemptEnded(is_over=True, in_order=True)
        assert served.box is not None
        assert served.box.calls[-1] == ((GPU,), "start", (None,), 77.0)


def test_the_first_box_takes_the_ssds_of_another_box_from_that_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[JobSpec] = []

    def make_context(spec: JobSpec, *_: object, **__: object) -> Any:
        seen.append(spec)
        return AnsweringBox.context

    monkeypatch.setattr(other_boxes, "make_context", make_context)
    with two_boxes(tmp_path, AnsweringBox) as (others, _):
        others.contexts(specs_of(), SimpleNamespace())  # type: ignore[arg-type]
        others.end(is_over=True, in_order=True)
    assert len(specs_of()[1].ssd_dirs) == 2
    assert [spec.ssd_dirs for spec in seen] == [("/its/ssd",)]


@pytest.mark.parametrize("method", METHODS)
def test_a_box_that_fails_at_its_start_is_named_with_its_reason(tmp_path: Path, method: str) -> None:
    with two_boxes(tmp_path, lambda: AnsweringBox(method)) as (others, served):
        with pytest.raises(BoxFailedError, match=f"box 'east': no {method} here"):
            start(others, specs_of())
        others.end(is_over=False, in_order=False)
        served.join()
        assert isinstance(served.error, ValueError)


def test_a_box_that_fails_before_the_first_one_is_there_waits_for_it(tmp_path: Path) -> None:
    specs, (here, there) = specs_of(), ends(tmp_path / "links", 2)
    served = Served(specs[1], there, lambda: AnsweringBox("plan"))
    served.thread.join(1.5)
    assert served.thread.is_alive()
    link = BoxLink(specs[0], here, REQUESTS)
    others = OtherBoxes(link, here.names)
    with pytest.raises(BoxFailedError, match="box 'east': no plan here"):
        start(others, specs)
    others.end(is_over=False, in_order=False)
    served.join()
    link.stop()


def test_a_box_with_other_settings_than_the_first_one_is_refused(tmp_path: Path) -> None:
    with two_boxes(tmp_path, AnsweringBox) as (others, _):
        first, other = specs_of()
        with pytest.raises(ValueError, match="box 'east' and the first box differ in the settings: all boxes"):
            others.contexts([first.with_training(seed=5), other], SimpleNamespace())  # type: ignore[arg-type]
        others.end(is_over=False, in_order=False)


def test_an_error_that_another_attempt_may_not_have_is_a_loss(tmp_path: Path) -> None:
    error = TimeoutError("a disk hangs")
    with two_boxes(tmp_path, lambda: AnsweringBox("start", error)) as (others, _):
        with pytest.raises(ActorLostError, match="box 'east': a disk hangs"):
            start(others, specs_of())
        others.end(is_over=False, in_order=False)


def test_a_box_whose_process_dies_in_training_is_told_by_the_next_check(tmp_path: Path) -> None:
    with two_boxes(tmp_path, AnsweringBox) as (others, served):
        start(others, specs_of())
        others.check()
        assert served.box is not None
        served.box.has_died.set()
        with pytest.raises(ActorLostError, match="box 'east': the process of b1/gpu-0 died"):  # noqa: PT012
            while True:
                others.check()
        others.end(is_over=False, in_order=False)


def test_the_end_of_the_attempt_is_taken_after_a_call_that_came_too_late(tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(AnsweringBox):
        def call(self, names: Sequence[ActorName], method: str, *arguments: object, deadline_s: float = 0.0) -> Any:
            begun.set()
            assert goes_on.wait(_WAIT_S)
            return super().call(names, method, *arguments, deadline_s=deadline_s)

    def fail_here(names: Sequence[ActorName], method: str, *_: object, deadline_s: float = 0.0) -> dict[Any, Any]:
        assert begun.wait(_WAIT_S)
        raise ValueError("this box fails itself")

    with two_boxes(tmp_path, Slow) as (others, served):
        others.contexts(specs_of(), SimpleNamespace())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="this box fails itself"):
            others.call(fail_here, [ssd_name(0), SSD], "start", None)
        others.end(is_over=False, in_order=False)
        goes_on.set()
        served.join()
        assert (served.end, served.error) == (AttemptEnded(is_over=False, in_order=False), None)


@pytest.mark.parametrize("during", ["plan", "start"])
def test_a_box_that_waits_at_its_start_ends_when_the_first_one_has_ended_the_attempt(
    tmp_path: Path, during: str
) -> None:
    waits = threading.Event()

    class Waiting(AnsweringBox):
        """Waits for a device, or for its processes."""

        def _fail(self, method: str) -> None:
            while method == during:
                check_ends[0]()
                waits.set()

    check_ends: list[Callable[[], None]] = []
    specs, (here, there) = specs_of(), ends(tmp_path / "links", 2)
    with ExitStack() as stack:
        served = Served(specs[1], there, Waiting, check_ends)
        stack.callback(served.join)
        link = BoxLink(specs[0], here, REQUESTS)
        stack.callback(link.stop)
        others = OtherBoxes(link, here.names)
        if during == "start":
            others.contexts(specs, SimpleNamespace())  # type: ignore[arg-type]
            link.request(1, ActorsCalled(number=1, names=(GPU,), method="start", deadline_s=60.0))
        assert waits.wait(_WAIT_S)
        others.end(is_over=False, in_order=False)
        served.join()
        assert (served.end, served.error) == (AttemptEnded(is_over=False, in_order=False), None)


def test_messages_of_other_processes_go_to_the_link_and_over_it_and_their_errors_to_the_scheduler(
    tmp_path: Path,
) -> None:
    told: queue.SimpleQueue[tuple[ActorName, Message]] = queue.SimpleQueue()
    specs, arena = specs_of(), SimpleNamespace()
    about: dict[str, Any] = {"job": specs[0].job, "step": Step(3)}

    def tell(to: ActorName, message: Message) -> None:
        told.put((to, message))

    with ExitStack() as stack:
        links = [BoxLink(spec, end) for spec, end in zip(specs, ends(tmp_path / "links", 2), strict=True)]
        for link in links:
            stack.callback(link.stop)
            link.open(arena, send=tell, deliver=tell)  # type: ignore[arg-type]
        links[1].post_all([UserMessage(**about, text="for the scheduler")])
        to, failed = told.get(timeout=_WAIT_S)
        assert isinstance(failed, ActorFailed)
        assert (to, failed.actor, failed.step) == (SCHEDULER, link_name(1), 3)
        assert "b1/link-0 has no handler for UserMessage" in failed.error

        links[1].deliver(SCHEDULER, [UserMessage(**about, text=text) for text in ("one", "x" * (2 << 20), "two")])
        received = [told.get(timeout=_WAIT_S)[1] for _ in range(3)]
        assert [each.text for each in received if isinstance(each, UserMessage)] == ["one", "two"]
        assert ["a Mail of 2.01 MiB" in each.error for each in received if isinstance(each, ActorFailed)] == [True]
        links[0].stop()
        links[1].deliver(SCHEDULER, [UserMessage(**about, text="dropped")])


def test_spans_of_another_box_have_times_by_the_clock_of_the_first_one(tmp_path: Path) -> None:
    told: queue.SimpleQueue[Message] = queue.SimpleQueue()
    (first, other), (here, there) = specs_of(), ends(tmp_path / "links", 2)
    span = WorkSpan("b1/gpu-0/compute", SpanKind.FORWARD, 1, 2, -1, 5000.0, 5003.0, 0)
    with ExitStack() as stack:
        links = [BoxLink(first, here, clock=lambda: 100.0), BoxLink(other, there, clock=lambda: 5005.0)]
        for link in links:
            stack.callback(link.stop)
            link.open(SimpleNamespace(), send=lambda *_: None, deliver=lambda to, message: told.put(message))  # type: ignore[arg-type]
        links[1].send(SCHEDULER, SpansReported(job=first.job, step=Step(1), actor=GPU, spans=(span,)))
        reported = told.get(timeout=_WAIT_S)
    assert isinstance(reported, SpansReported)
    assert reported.spans == (span._replace(start_s=95.0, end_s=98.0),)


def test_params_for_an_export_come_after_all_else_and_go_to_the_first_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[tuple[KeyKind, tuple[int, int]]] = []
    offered: list[tuple[KeyKind, set[BoxName]]] = []

    def pull(self: Link, key: LinkKey, into: memoryview, *, source: BoxName, priority: tuple[int, int]) -> Any:
        pulled.append((key.kind, priority))
        return Future[Any]()

    def offer(self: Link, key: LinkKey, buffer: memoryview, to: set[BoxName]) -> Any:
        offered.append((key.kind, to))
        return Future[Any]()

    monkeypatch.setattr(Link, "pull", pull)
    monkeypatch.setattr(Link, "offer", offer)
    stages = Stage(0, 2), Stage(2, 4), Stage(4, 5)
    spec = replace(make_spec(), stages=stages, box=2)
    params = Crossing.of_params(Step(1), ChunkKey(BlockIndex(4), ChunkIndex(0)))
    hidden = Crossing(Step(1), Phase.BACKWARD, BlockIndex(3), 0, 0)
    with ExitStack() as stack:
        *others, here = ends(tmp_path / "links", 3)
        for other in others:
            stack.callback(other.listener.close)
        link = BoxLink(spec, here)
        stack.callback(link.stop)
        arena: Any = SimpleNamespace(buffer=lambda span: memoryview(bytearray(span.nbytes)))
        link.open(arena, send=lambda to, message: None, deliver=lambda to, message: None)
        for crossing, taker in ((params, 0), (hidden, 1)):
            common: dict[str, Any] = {"job": spec.job, "step": Step(1), "crossing": crossing, "span": Span(0, 64)}
            link.post(OfferSpan(**common, reply_to=GPU, box=taker))
            link.post(PullSpan(**common, reply_to=GPU, box=1))
    assert offered == [(KeyKind.EXPORT, {BoxName("north")}), (KeyKind.ACTIVATION_GRAD, {BoxName("east")})]
    (_, of_params), (_, of_hidden) = pulled
    assert of_params > of_hidden


@pytest.mark.parametrize("pulls_first", [False, True])
@pytest.mark.parametrize(("offered", "outcome"), [(100, SpanPulled), (4097, ActorFailed)])
def test_a_pull_tells_how_many_bytes_came_or_that_they_are_too_many(
    tmp_path: Path, offered: int, outcome: type[Message], *, pulls_first: bool
) -> None:
    arena: Any = SimpleNamespace(buffer=lambda span: memoryview(bytearray(span.nbytes)))
    told: list[Message] = []
    changed = threading.Condition()

    def tell(to: ActorName, message: Message) -> None:
        with changed:
            told.append(message)
            changed.notify_all()

    specs = specs_of()
    crossing = Crossing(Step(1), Phase.FORWARD, BlockIndex(2), 0, 0)
    common: dict[str, Any] = {"job": specs[0].job, "step": Step(1), "crossing": crossing}
    offer = OfferSpan(**common, reply_to=gpu_worker_name(0), box=1, span=Span(0, offered))
    pull = PullSpan(**common, reply_to=GPU, box=0, span=Span(0, 4096))
    with ExitStack() as stack:
        links = [BoxLink(spec, end) for spec, end in zip(specs, ends(tmp_path / "links", 2), strict=True)]
        for link in links:
            stack.callback(link.stop)
            link.open(arena, send=tell, deliver=tell)
        steps = [lambda: links[1].post(pull), lambda: links[0].post(offer)]
        for step in steps if pulls_first else reversed(steps):
            try:
                step()
            except RuntimeError as error:  # as the caller of `post` would report it
                tell(GPU, ActorFailed.of(error, actor=GPU, about=pull))
        with changed:
            assert changed.wait_for(lambda: any(isinstance(each, outcome) for each in told), _WAIT_S), told
    if outcome is SpanPulled:
        assert [each.nbytes for each in told if isinstance(each, SpanPulled)] == [offered]
