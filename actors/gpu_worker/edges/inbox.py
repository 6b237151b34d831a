"""The slots for spans that another box sends, and the requests for them."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from windlass.actors.messages import Crossing, PullSpan
from windlass.storage.ids import ActorName, JobId, Span


@dataclass(slots=True)
class Inbox:
    """The slots for what one other box sends. Its owner's lock guards it."""

    box: int  # index of the other one
    free: list[Span]
    expected: deque[Crossing] = field(default_factory=deque)  # not requested yet, in the order of operations
    pulled: dict[Crossing, Span] = field(default_factory=dict)  # requested, and perhaps there

    def pulls(self, job: JobId, name: ActorName) -> Iterator[PullSpan]:
        """Yields requests for as many of the next spans as there are slots. The answers go to the actor `name`."""
        while self.free and self.expected:
            crossing, slot = self.expected.popleft(), self.free.pop()
            self.pulled[crossing] = slot
            yield PullSpan(job=job, step=crossing.step, reply_to=name, box=self.box, crossing=crossing, span=slot)
