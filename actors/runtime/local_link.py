"""The links of boxes that are all in one process: bytes go from arena to arena. For tests."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windlass.actors.job import JobSpec, link_name
from windlass.actors.lifecycle import ActorThreads
from windlass.actors.messages import Crossing, DescribeStatus, Message, OfferSpan, OfferTaken, PullSpan, SpanPulled
from windlass.storage.cancellation import CancelToken, TaskQueue
from windlass.storage.ids import ActorName, Span
from windlass.storage.memory import Arena


@dataclass(frozen=True, slots=True)
class _Post:
    """A message, and the box whose link has it."""

    box: int
    message: OfferSpan | PullSpan


class LocalLinks:
    """The links of all boxes of a job, with one thread for all."""

    def __init__(self, spec: JobSpec, arenas: Sequence[Arena], send: Callable[[ActorName, Message], None]) -> None:
        """Starts the thread. `spec`: of any box. `arenas`: those of all boxes, in their order; the caller may add them
        until they are used.
        """
        self._job, self._arenas, self._send = spec.job, arenas, send
        self._token = CancelToken()
        self._posts: TaskQueue[_Post] = TaskQueue(self._token)
        # By the box that offers.
        self._offers: dict[tuple[int, Crossing], OfferSpan] = {}
        self._pulls: dict[tuple[int, Crossing], _Post] = {}
        self._threads = ActorThreads(link_name(), spec.job, self._token, send, deadline_s=spec.deadline_s)
        self._threads.start((self._run,))

    def of(self, box: int) -> "LocalLink":
        """Returns the link of a box."""
        return LocalLink(self, box)

    def post(self, box: int, message: Message) -> None:
        """Queues a message to the link of a box."""
        match message:
            case OfferSpan() | PullSpan():
                self._posts.put(_Post(box, message))
            case DescribeStatus():
                self._threads.report_status("")
            case _:
                raise ValueError(f"{link_name(box)} has no handler for {type(message).__name__}")

    def stop(self) -> None:
        """Ends the thread. Raises TimeoutError if it hangs."""
        self._threads.stop()

    def _run(self) -> None:
        while (post := self._posts.take()) is not None:
            message = post.message
            if isinstance(message, OfferSpan):
                key = (post.box, message.crossing)
                self._offers[key] = message
            else:
                key = (message.box, message.crossing)
                self._pulls[key] = post
            if key in self._offers and key in self._pulls:
                self._move(self._offers.pop(key), key[0], self._pulls.pop(key))

    def _move(self, offer: OfferSpan, offering: int, pull: _Post) -> None:
        """Copies offered bytes into the slot of the box that pulls them, and tells both GPU workers."""
        target = self._arenas[pull.box].buffer(Span(pull.message.span.offset, offer.span.nbytes))
        start_s = time.monotonic()
        target[:] = self._arenas[offering].buffer(offer.span)
        crossing, step = offer.crossing, offer.step
        pulled = SpanPulled(
            job=self._job,
            step=step,
            crossing=crossing,
            box=offering,
            nbytes=offer.span.nbytes,
            start_s=start_s,
            end_s=time.monotonic(),
        )
        self._send(pull.message.reply_to, pulled)
        self._send(offer.reply_to, OfferTaken(job=self._job, step=step, crossing=crossing))


class LocalLink:
    """The link of one box."""

    def __init__(self, links: LocalLinks, box: int) -> None:
        self.name = link_name(box)
        self._links = links
        self._box = box

    def post(self, message: Message) -> None:
        """See `LocalLinks.post`."""
        self._links.post(self._box, message)
