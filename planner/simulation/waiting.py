"""Primitives that simulated processes wait for.

They are like SimPy's stores and containers, but create no event if nothing must be waited for. Events are most of the
cost of simulating a large job.
"""

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

import simpy

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
# A process that waits for events and returns a result.
ProcessReturning = Generator[simpy.Event, Any, _Result]
Process = ProcessReturning[None]


class Signal:
    """A condition variable: several processes may wait for each change."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._next: simpy.Event | None = None  # the event that processes wait for now

    def notify(self) -> None:
        """Notifies all waiting processes of a change."""
        event, self._next = self._next, None
        if event is not None:
            event.succeed()

    def until(self, condition: Callable[[], bool]) -> Process:
        """Waits until `condition` is true."""
        while not condition():
            yield self.next

    @property
    def next(self) -> simpy.Event:
        """The event of the next change."""
        if self._next is None:
            self._next = self._env.event()
        return self._next


class Queue(Generic[_Item]):
    """A FIFO queue with one receiver."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._items: deque[_Item] = deque()
        self._arrived: simpy.Event | None = None  # the event that the receiver waits for

    def put(self, item: _Item) -> None:
        """Appends an item."""
        self._items.append(item)
        if self._arrived is not None:
            self._arrived.succeed()
            self._arrived = None

    def get(self) -> ProcessReturning[_Item]:
        """Returns the first item, and waits if there is none."""
        if not self._items:
            self._arrived = self._env.event()
            yield self._arrived
        return self._items.popleft()


class Slots:
    """A pool of equal slots. A request for several gets all of them at once; requests are served in order."""

    def __init__(
        self, env: simpy.Environment, num_free: int, note: Callable[[int], None] = lambda num_taken: None
    ) -> None:
        """`note` is called with the number of slots acquired, or a negative number of slots released."""
        self._env = env
        self._num_free = num_free
        self._note = note
        self._waiting: deque[tuple[int, simpy.Event]] = deque()

    def take(self, count: int = 1) -> Process:
        """Returns when the caller has the slots."""
        if self._waiting or count > self._num_free:
            taken = self._env.event()
            self._waiting.append((count, taken))
            yield taken
        else:
            self._num_free -= count
            self._note(count)

    def give_back(self, count: int = 1) -> None:
        """Releases slots."""
        self._num_free += count
        self._note(-count)
        while self._waiting and self._waiting[0][0] <= self._num_free:
            count, taken = self._waiting.popleft()
            self._num_free -= count
            self._note(count)
            taken.succeed()
