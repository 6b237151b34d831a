"""What simulated processes wait for. As SimPy's stores and containers, but that what is there is had without an event:
most of what a simulation of a large job costs are events.
"""

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

import simpy

_Found = TypeVar("_Found")
_Item = TypeVar("_Item")
# What waits for events, and comes to something in the end.
Finding = Generator[simpy.Event, Any, _Found]
Process = Finding[None]


class Signal:
    """What several processes may wait for, again and again."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._next: simpy.Event | None = None  # that somebody waits for

    def tell(self) -> None:
        """Something has changed: who waits looks again."""
        told, self._next = self._next, None
        if told is not None:
            told.succeed()

    def until(self, condition: Callable[[], bool]) -> Process:
        """Waits until it holds."""
        while not condition():
            yield self.next

    @property
    def next(self) -> simpy.Event:
        """The next change."""
        if self._next is None:
            self._next = self._env.event()
        return self._next


class Queue(Generic[_Item]):
    """Things for one process, which takes them in the order in which they came."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._items: deque[_Item] = deque()
        self._arrived: simpy.Event | None = None  # that the process waits for

    def put(self, item: _Item) -> None:
        """It may be taken from now on."""
        self._items.append(item)
        if self._arrived is not None:
            self._arrived.succeed()
            self._arrived = None

    def get(self) -> Finding[_Item]:
        """Returns the first, once there is one."""
        if not self._items:
            self._arrived = self._env.event()
            yield self._arrived
        return self._items.popleft()


class Slots:
    """Some that are free; who asks for several gets them at once, and who asks first is served first."""

    def __init__(
        self, env: simpy.Environment, num_free: int, note: Callable[[int], None] = lambda num_taken: None
    ) -> None:
        """`note` is called with how many are taken, or less than 0: given back."""
        self._env = env
        self._num_free = num_free
        self._note = note
        self._waiting: deque[tuple[int, simpy.Event]] = deque()

    def take(self, count: int = 1) -> Process:
        """Returns when they are the caller's."""
        if self._waiting or count > self._num_free:
            taken = self._env.event()
            self._waiting.append((count, taken))
            yield taken
        else:
            self._num_free -= count
            self._note(count)

    def give_back(self, count: int = 1) -> None:
        """They are free again."""
        self._num_free += count
        self._note(-count)
        while self._waiting and self._waiting[0][0] <= self._num_free:
            count, taken = self._waiting.popleft()
            self._num_free -= count
            self._note(count)
            taken.succeed()
