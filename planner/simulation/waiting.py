"""Primitives that simulated processes wait for.

They create no event if nothing must be waited for.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from windlass.planner.simulation.clock import Clock, Future, Process, ProcessReturning

_Item = TypeVar("_Item")


class Signal:
    """A condition variable: several processes may wait for each change."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next: Future | None = None  # the event that processes wait for now

    def notify(self) -> None:
        """Notifies all waiting processes of a change."""
        if self._next is not None:
            event, self._next = self._next, None
            event.set_done()

    def until(self, condition: Callable[[], bool]) -> Process:
        """Waits until `condition` is true."""
        while not condition():
            yield self.next

    @property
    def next(self) -> Future:
        """The event of the next change."""
        if self._next is None:
            self._next = Future(self._clock)
        return self._next


class Queue(Generic[_Item]):
    """A FIFO queue with one receiver."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._items: deque[_Item] = deque()
        self._arrived: Future | None = None  # the event that the receiver waits for

    def put(self, item: _Item) -> None:
        """Appends an item."""
        self._items.append(item)
        if self._arrived is not None:
            event, self._arrived = self._arrived, None
            event.set_done()

    def get(self) -> ProcessReturning[_Item]:
        """Returns the first item, and waits if there is none."""
        if not self._items:
            self._arrived = Future(self._clock)
            yield self._arrived
        return self._items.popleft()


class Slots:
    """A pool of equal slots. A request for several gets all of them at once; requests are served in order."""

    def __init__(self, clock: Clock, num_free: int, note: Callable[[int], None] | None = None) -> None:
        """`note` is called with the number of slots acquired, or a negative number of slots released."""
        self._clock = clock
        self.num_free = num_free
        self._note = note
        self._waiting: deque[tuple[int, Future]] = deque()

    def take(self, count: int = 1) -> Process:
        """Returns when the caller has the slots."""
        if self._waiting or count > self.num_free:
            taken = Future(self._clock)
            self._waiting.append((count, taken))
            yield taken
        else:
            self._acquire(count)

    def give_back(self, count: int = 1) -> None:
        """Releases slots."""
        self._acquire(-count)
        while self._waiting and self._waiting[0][0] <= self.num_free:
            count, taken = self._waiting.popleft()
            self._acquire(count)
            taken.set_done()

    def _acquire(self, count: int) -> None:
        self.num_free -= count
        if self._note is not None:
            self._note(count)
