"""A move among boxes that reach each other only over the link.

The first box calls the movers of all boxes. Each other box serves its calls, and tells how many bytes have come.
"""

import contextlib
import functools
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from windlass.actors.job import JobSpec
from windlass.actors.messages import Message
from windlass.actors.runtime.boxes import BoxFailed, BoxLink, FirstBox, LinkEnd, require_no_failure
from windlass.actors.runtime.moving.division import MoveSpec, blocks_text
from windlass.actors.runtime.moving.lead import LeadMove, Moved
from windlass.actors.runtime.moving.mover import Mover
from windlass.actors.scheduler import ActorLostError
from windlass.engine.model import ModelLayout
from windlass.storage.ids import ActorName, Attempt, LayoutEpoch
from windlass.storage.memory import Arena
from windlass.storage.store import CommitRecord, StoreJournal

# Stands for the attempt in the question whether a box that lacks room had it before: new stores never had theirs.
_NO_ROOM_BEFORE = Attempt(1)
_TICK_S = 1.0  # between two looks for a stop


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverCalled:
    """The first box calls a method of another box's mover."""

    method: str
    commit: CommitRecord | None = None  # for `move`
    kept: int | None = None  # the layout epoch for `finish`


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverAnswered:
    """The mover of a box has carried out a method."""

    method: str
    journals: tuple[StoreJournal, ...] = ()
    new_journals: tuple[StoreJournal, ...] = ()  # of `look`, which reads those of both divisions
    digest: str = ""  # of `look`: of what all boxes must know alike


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksCame:
    """Some of the chunks that a box gets are there."""

    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnded:
    """The first box has ended the move."""

    kept: int | None  # the layout epoch whose stores stay; None: it is not known, or all is done


MOVE_REQUESTS = (MoverCalled, MoverAnswered, ChunksCame, MoveEnded, BoxFailed)
_METHODS = frozenset({"look", "prepare", "move", "finish"})


def move_over_link(
    spec: MoveSpec,
    layout: ModelLayout,
    end: LinkEnd,
    *,
    direct: bool = True,
    check_stop: Callable[[], None] = lambda: None,
    on_progress: Callable[[int], None] = lambda nbytes: None,
) -> Moved | None:
    """Carries out one box's part in a move, in this process; see `LeadMove`. Only the first box returns the end.

    `end` has the boxes of `spec.names`. `on_progress` is called on the first box: with 0 once all boxes have answered,
    and then with the bytes that have come on all of them. `check_stop` raises an error if the move is to stop.

    Raises:
        ActorLostError: another box is lost.
        BoxFailedError: another box cannot do its part.
    """
    with contextlib.ExitStack() as ending:
        link = BoxLink(_of_link(spec), end, MOVE_REQUESTS)
        ending.callback(link.stop)
        if spec.box:
            _serve(spec, layout, link, direct, check_stop, ending)
            return None
        return _lead(spec, layout, link, direct, check_stop, on_progress, ending)


def _mover_of(spec: MoveSpec, layout: ModelLayout, link: BoxLink, **options: Any) -> Mover:
    """Returns the mover of a box, which the link answers."""

    def open_link(arena: Arena) -> Callable[[Message], None]:
        link.open(arena, send=lambda to, message: mover.take(message), deliver=_refuse)
        return link.post

    mover = Mover(spec, layout, open_link=open_link, **options)
    return mover


def _refuse(to: ActorName, message: Message) -> None:
    raise ValueError(f"{type(message).__name__} to {to}: a move has no actors")


def _of_link(spec: MoveSpec) -> JobSpec:
    """Returns a specification with which the boxes that take part know each other."""
    return replace(spec.any, box=spec.box, layout_epoch=spec.epoch, stages=(), ranks_of_boxes=())


class _OtherMovers:
    """The movers of the other boxes, as the first box sees them. One thread at a time."""

    def __init__(self, spec: MoveSpec, layout: ModelLayout, link: BoxLink, on_progress: Callable[[int], None]) -> None:
        self._spec, self._layout, self._link, self._on_progress = spec, layout, link, on_progress
        self._answers: dict[int, MoverAnswered] = {}
        self._come = dict.fromkeys(range(len(spec.names)), 0)

    def begin(self, called: MoverCalled) -> None:
        """Calls a method on all other boxes."""
        self._answers.clear()
        for box in range(1, len(self._spec.names)):
            with contextlib.suppress(ConnectionError):  # the reason comes with the answers
                self._link.request(box, called)

    def answers(self, method: str, check_stop: Callable[[], None]) -> list[MoverAnswered]:
        """Waits for the answers of all other boxes, and returns them in order."""
        while len(self._answers) < len(self._spec.names) - 1:
            check_stop()
            self.check(_TICK_S)
        found = [self._answers[box] for box in sorted(self._answers)]
        if any(each.method != method for each in found):
            raise ValueError(f"boxes have answered {[each.method for each in found]}, and {method} was called")
        return found

    def check(self, wait_s: float = 0.0) -> None:
        """Takes what boxes have told. Raises the error of one that is lost or has failed."""
        until_s = time.monotonic() + wait_s
        with contextlib.suppress(queue.Empty):
            while True:
                box, told = self._link.requests.get(timeout=max(0.0, until_s - time.monotonic()))
                self._take(box, told)
                if isinstance(told, MoverAnswered):
                    return

    def note(self, box: int, nbytes: int) -> None:
        """Notes how many bytes have come on a box."""
        self._come[box] = nbytes
        self._on_progress(sum(self._come.values()))

    def end(self, kept: LayoutEpoch | None) -> None:
        """Tells all other boxes that the move has ended. One that is lost ends by itself, and keeps all stores."""
        for box in range(1, len(self._spec.names)):
            with contextlib.suppress(ConnectionError):
                self._link.request(box, MoveEnded(kept=kept))

    def _take(self, box: int, told: object) -> None:
        name = self._spec.names[box]
        match told:
            case MoverAnswered():
                self._answers[box] = told
            case ChunksCame():
                self.note(box, told.nbytes)
            case ConnectionError():
                raise ActorLostError(f"{told}{self._advice(box)}") from told
            case _:
                require_no_failure(name, told)
                raise ValueError(f"box {name!r} sent {told}")

    def _advice(self, box: int) -> str:
        """Says what of the job's states a lost box has, and what can be done."""
        holder = self._spec.holders[box]
        if holder is None:
            return ""
        return (
            f"; it has the states of {blocks_text(holder, len(self._layout.blocks))}, which no other box has: bring it "
            "back, or begin again from the last checkpoint"
        )


def _lead(
    spec: MoveSpec,
    layout: ModelLayout,
    link: BoxLink,
    direct: bool,
    check_stop: Callable[[], None],
    on_progress: Callable[[int], None],
    ending: contextlib.ExitStack,
) -> Moved:
    others = _OtherMovers(spec, layout, link, on_progress)

    def check() -> None:
        check_stop()
        others.check()

    here = _mover_of(spec, layout, link, direct=direct, check_stop=check, on_progress=functools.partial(others.note, 0))
    ending.callback(here.close)
    ending.callback(link.stop)  # before the memory goes

    def call(method: str, *arguments: Any) -> list[Any]:
        commit = next((each for each in arguments if isinstance(each, CommitRecord)), None)
        kept = next((each for each in arguments if isinstance(each, int)), None)
        others.begin(MoverCalled(method=method, commit=commit, kept=kept))
        mine = getattr(here, method)(*arguments)
        theirs = others.answers(method, check_stop)
        if method == "look":
            for name, each in zip(spec.names[1:], theirs, strict=True):
                if each.digest != spec.digest(layout):
                    raise ValueError(
                        f"box {name!r} and the first box differ in the division of the blocks, or in the model's "
                        "layout: all boxes of a job need the same ones"
                    )
            others.note(0, 0)
            return [mine, *((each.journals, each.new_journals) for each in theirs)]
        return [mine, *(each.journals for each in theirs)]

    lead = LeadMove(spec, layout, call)
    try:
        moved = _run(lead, others)
    except BaseException as error:
        kept = lead.kept if isinstance(error, Exception) else None
        others.end(kept)
        if kept is not None:
            link.stop()
            here.finish(kept)
        raise
    others.end(None)
    return moved


def _run(lead: LeadMove, others: _OtherMovers) -> Moved:
    try:
        return lead.run()
    except ActorLostError:
        others.check()  # the link may have said which box is lost, and a transfer failed of it first
        raise


def _serve(
    spec: MoveSpec,
    layout: ModelLayout,
    link: BoxLink,
    direct: bool,
    check_stop: Callable[[], None],
    ending: contextlib.ExitStack,
) -> None:
    """Carries out the calls of the first box until that ends the move."""
    first = FirstBox(link, MoveEnded)

    def check() -> None:
        check_stop()
        first.check_end()

    def tell_progress(nbytes: int) -> None:
        first.tell(ChunksCame(nbytes=nbytes))

    mover = _mover_of(spec, layout, link, direct=direct, check_stop=check, on_progress=tell_progress)

    def work() -> MoveEnded:
        while not isinstance(request := first.next_request(check_stop), MoveEnded):
            first.tell(_carried_out(mover, request))
        return request

    def end() -> None:
        link.stop()  # before the memory goes
        mover.close()
        if first.end is not None and first.end.kept is not None:
            mover.finish(LayoutEpoch(first.end.kept))

    ending.callback(end)
    first.work_until_end(work, _NO_ROOM_BEFORE)


def _carried_out(mover: Mover, called: object) -> MoverAnswered:
    if not isinstance(called, MoverCalled) or called.method not in _METHODS:
        raise ValueError(f"the first box sent {called}")
    match called.method:
        case "look":
            old, new = mover.look()
            digest = mover.spec.digest(mover.layout)
            return MoverAnswered(method="look", journals=old, new_journals=new, digest=digest)
        case "prepare":
            return MoverAnswered(method="prepare", journals=mover.prepare())
        case "move":
            assert called.commit is not None, "the first box names the commit"
            return MoverAnswered(method="move", journals=mover.move(called.commit))
    assert called.kept is not None, "the first box names the division"
    mover.finish(LayoutEpoch(called.kept))
    return MoverAnswered(method="finish")
