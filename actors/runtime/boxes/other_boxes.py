"""The start and the end of an attempt over several boxes.

The runner of the first box calls the actors of all boxes. Each other box has a runner of its own, which starts the
processes there and carries out the calls. Calls and answers cross the boxes' link, in its closed codec.
"""

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from windlass.actors.job import JobContext, JobSpec, SsdFacts, box_of, make_context
from windlass.actors.runtime import START_DEADLINE_S, CallActors, DuringWait, waits_for
from windlass.actors.runtime.boxes.box_link import BoxLink
from windlass.actors.runtime.boxes.copies import digests_of, require_alike
from windlass.actors.runtime.boxes.first_box import BoxFailed, FirstBox, require_no_failure
from windlass.amounts import bytes_text
from windlass.engine.model import ModelLayout
from windlass.storage.ids import ActorName, BoxName
from windlass.storage.store import CommitRecord, StoreJournal

_TICK_S = 1.0  # between two looks at the processes of a box, and for a stop


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxPlanned:
    """A box has planned its part. The first box makes the same plan from these facts."""

    ssds: tuple[SsdFacts, ...]
    ssd_dirs: tuple[str, ...]  # its own, of which the first box may know neither the paths nor the number
    free_nbytes: int  # of host memory, when it planned
    arena_nbytes: int
    digests: dict[str, str]  # see `digests_of`


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorsCalled:
    """The first box calls a method of actors of another box, as `start_actors` does."""

    number: int
    names: tuple[ActorName, ...]
    method: str
    commit: CommitRecord | None = None
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorsAnswered:
    """All actors of a call have answered."""

    number: int
    journals: dict[ActorName, StoreJournal]  # empty if the method returns nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """The first box has ended the attempt."""

    is_over: bool  # the job is, so its states are deleted
    in_order: bool  # False: processes may be dead or hang


REQUESTS = (BoxPlanned, ActorsCalled, ActorsAnswered, BoxFailed, AttemptEnded)
_METHODS = frozenset({"read_journal", "open_space", "start"})


class OtherBoxes:
    """The other boxes of an attempt, as the first box's runner sees them. One thread at a time."""

    def __init__(self, link: BoxLink, names: Sequence[BoxName], *, during_wait: DuringWait = lambda _: None) -> None:
        """`names`: of all boxes, in their order."""
        self._link, self._names, self._during_wait = link, names, during_wait
        self._num_calls = 0

    def contexts(self, specs: Sequence[JobSpec], layout: ModelLayout) -> list[JobContext]:
        """Waits until all other boxes have planned, and returns their contexts. `specs`: those of all boxes.

        The box itself tells its SSDs. Its other paths in `specs` are not read.

        Raises:
            BoxFailedError, ActorLostError, TimeoutError: a box cannot plan its part, is lost, or does not answer.
            ValueError: a box has other settings, or another model or dataset, than the first one.
        """
        first, *others = specs
        digests = digests_of(first, layout)
        planned = self._await(
            {spec.box for spec in others}, BoxPlanned, START_DEADLINE_S, "planned its part", waits_for("address")
        )
        contexts = []
        for spec in others:
            there = planned[spec.box]
            require_alike(self._names[spec.box], digests, there.digests)
            theirs = replace(spec, ssd_dirs=there.ssd_dirs)
            contexts.append(context := make_context(theirs, layout, "", there.ssds, free_nbytes=there.free_nbytes))
            if context.plan.arena_nbytes != there.arena_nbytes:
                raise ValueError(
                    f"box {self._names[spec.box]!r} plans {bytes_text(there.arena_nbytes)} of host memory, and the "
                    f"first box plans {bytes_text(context.plan.arena_nbytes)} for it: their versions or settings differ"
                )
        return contexts

    def call(
        self,
        call_here: CallActors,
        names: Sequence[ActorName],
        method: str,
        *arguments: object,
        deadline_s: float = START_DEADLINE_S,
    ) -> dict[ActorName, Any]:
        """Calls actors of any boxes; see CallActors. `call_here` calls those of the first box.

        Raises the errors of `contexts`, too.
        """
        self._num_calls += 1
        (commit,) = arguments or (None,)
        assert commit is None or isinstance(commit, CommitRecord)
        by_box: dict[int, list[ActorName]] = {}
        for name in names:
            by_box.setdefault(box_of(name), []).append(name)
        here = by_box.pop(0, [])
        for box, theirs in by_box.items():
            called = ActorsCalled(
                number=self._num_calls, names=tuple(theirs), method=method, commit=commit, deadline_s=deadline_s
            )
            with contextlib.suppress(ConnectionError):  # the reason comes with the answers
                self._link.request(box, called)
        answers = call_here(here, method, *arguments, deadline_s=deadline_s) if here else {}
        for box, answered in self._await(
            set(by_box), ActorsAnswered, deadline_s, f"carried out {method}", waits_for(method)
        ).items():
            answers |= answered.journals or dict.fromkeys(by_box[box])
        return {name: answers[name] for name in names}

    def check(self) -> None:
        """Raises ActorLostError if another box is lost or has failed. It is called while the job trains."""
        while not self._link.requests.empty():
            box, request = self._link.requests.get()
            require_no_failure(self._names[box], request, is_running=True)

    def end(self, *, is_over: bool, in_order: bool) -> None:
        """Tells all other boxes that the attempt has ended; see AttemptEnded.

        One that is lost ends by itself, after the time in which its link waits for the others. Its states stay.
        """
        for box in range(1, len(self._names)):
            with contextlib.suppress(ConnectionError):
                self._link.request(box, AttemptEnded(is_over=is_over, in_order=in_order))

    def _await(self, boxes: set[int], kind: type, deadline_s: float, what: str, waited_for: str) -> dict[int, Any]:
        found: dict[int, Any] = {}
        until_s = time.monotonic() + deadline_s
        while missing := boxes - found.keys():
            whose = "Box" if len(missing) == 1 else "Boxes"
            self._during_wait(f"{whose} {' and '.join(self._names[each] for each in sorted(missing))}: {waited_for}")
            try:
                box, request = self._link.requests.get(timeout=_TICK_S)
            except queue.Empty:
                if time.monotonic() > until_s:
                    names = " and ".join(repr(self._names[each]) for each in sorted(missing))
                    raise TimeoutError(f"box {names} had not {what} within {deadline_s:g} s") from None
                continue
            require_no_failure(self._names[box], request)
            if not isinstance(request, kind) or getattr(request, "number", self._num_calls) != self._num_calls:
                raise ValueError(f"box {self._names[box]!r} sent {request} and had not {what}")
            found[box] = request
        return found


class Box(Protocol):
    """The processes of a box that are not the runner's."""

    context: JobContext
    free_nbytes: int  # of host memory, when the attempt was planned

    def call(
        self, names: Sequence[ActorName], method: str, *arguments: Any, deadline_s: float = START_DEADLINE_S
    ) -> dict[ActorName, Any]:
        """See CallActors."""

    def check(self) -> None:
        """Raises ActorLostError if a process has died."""


def serve_box(spec: JobSpec, link: BoxLink, make_box: Callable[[Callable[[], None]], Box]) -> AttemptEnded:
    """Plans a box's part, and carries out the calls of the first box, until that ends the attempt.

    `make_box` gets a function to call during its waits, also those of the box's calls. The function raises an error if
    the first box has ended the attempt. Other errors of the box end the attempt: they are told to the first box, and
    raised here.

    Raises:
        ActorLostError: a process of this box has died, or another box is lost.
    """
    first_box = FirstBox(link, AttemptEnded)

    def work() -> AttemptEnded:
        box = make_box(first_box.check_end)
        planned = BoxPlanned(
            ssds=box.context.ssds,
            ssd_dirs=box.context.spec.ssd_dirs,
            free_nbytes=box.free_nbytes,
            arena_nbytes=box.context.plan.arena_nbytes,
            digests=digests_of(spec, box.context.layout),
        )
        first_box.tell(planned)
        while not isinstance(request := first_box.next_request(box.check), AttemptEnded):
            if not isinstance(request, ActorsCalled):
                raise ValueError(f"the first box sent {request}")
            first_box.tell(_carried_out(box, spec.box, request))
        return request

    return first_box.work_until_end(work, spec.attempt)


def _carried_out(box: Box, index: int, called: ActorsCalled) -> ActorsAnswered:
    if called.method not in _METHODS or {box_of(name) for name in called.names} != {index}:
        raise ValueError(f"a call of {called.method} for {', '.join(called.names)}")
    arguments = (called.commit,) if called.method == "start" else ()
    answers = box.call(called.names, called.method, *arguments, deadline_s=called.deadline_s)
    journals = {name: answer for name, answer in answers.items() if isinstance(answer, StoreJournal)}
    return ActorsAnswered(number=called.number, journals=journals)
