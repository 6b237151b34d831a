"""The time of a simulation, and the processes that wait in it.

A process is a generator. It yields a `Future` to wait for it, or a number of seconds to let them pass. What happens at
the same time happens in the order of its causes: first what was set for that time, the earliest request first, and then
what follows from it.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Call = Callable[[], object]


class _Paused(Exception):
    """`Clock.pause` was called."""


def _pause() -> None:
    raise _Paused


class Clock:
    """Calls functions in the order of simulated time."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._ready: deque[_Call] = deque()  # what happens now
        self._later: list[tuple[float, int, _Call]] = []  # a heap by time and order of request
        self._num_later = 0

    def soon(self, call: _Call) -> None:
        """Calls a function now, after all that was to happen now already."""
        self._ready.append(call)

    def after(self, delay_s: float, call: _Call) -> None:
        """Calls a function after `delay_s`."""
        at_s = self.now + delay_s
        if at_s > self.now:
            self._num_later += 1
            heapq.heappush(self._later, (at_s, self._num_later, call))
        else:
            self._ready.append(call)

    def future(self) -> "Future":
        """Returns a future that is not done."""
        return Future(self)

    def process(self, generator: "ProcessReturning[Any]") -> "Future":
        """Starts a process soon. Returns the event of its end."""
        process = _Process(self, generator)
        self._ready.append(process.resume)
        return process

    def pause(self) -> None:
        """Makes `run` return after the current call."""
        self._ready.appendleft(_pause)

    @property
    def pending_s(self) -> list[float]:
        """The seconds until each later call, in order."""
        return sorted(at_s - self.now for at_s, _, _ in self._later)

    def run(self, *, max_calls: int | None = None) -> bool:
        """Lets time pass until nothing is left to happen, or `pause` is called.

        Also returns when `max_calls` functions were called. Returns whether something is left.
        """
        ready, later, next_call, pop = self._ready, self._later, self._ready.popleft, heapq.heappop
        try:
            for _ in itertools.repeat(None) if max_calls is None else range(max_calls):
                if ready:
                    next_call()()
                    continue
                if not later:
                    return False
                # All calls for this time come before those that they cause.
                self.now, _, call = pop(later)
                while later and later[0][0] == self.now:
                    ready.append(pop(later)[2])
                call()
        except _Paused:
            pass
        if ready and ready[0] is _pause:  # it was called by the last of `max_calls`
            next_call()
        return bool(ready or later)


class Future:
    """An event that happens once. Those that wait for it go on in the order in which they came."""

    __slots__ = ("_clock", "_waiting", "is_done")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # None: nothing waits. Emptied at the event, because calls that refer to it would make a cycle, which only the
        # garbage collector frees.
        self._waiting: list[_Call] | None = None
        self.is_done = False

    def set_done(self) -> None:
        """Lets all that wait go on soon."""
        self.is_done = True
        if self._waiting is not None:
            self._clock._ready.extend(self._waiting)
            self._waiting = None

    def then(self, call: _Call) -> None:
        """Calls a function soon after the event."""
        if self.is_done:
            self._clock._ready.append(call)
        elif self._waiting is None:
            self._waiting = [call]
        else:
            self._waiting.append(call)


# A process that waits for events or seconds, and returns a result.
ProcessReturning = Generator[Future | float, None, _Result]
Process = ProcessReturning[None]


class _Process(Future):
    """The end of a process, which happens when its generator returns."""

    __slots__ = ("_next",)

    def __init__(self, clock: Clock, generator: ProcessReturning[Any]) -> None:
        super().__init__(clock)
        self._next = generator.__next__

    def resume(self) -> None:
        """Runs the process until it must wait."""
        try:
            cause = self._next()
            while isinstance(cause, Future) and cause.is_done:
                cause = self._next()
        except StopIteration:
            self.set_done()
            return
        if isinstance(cause, Future):
            cause.then(self.resume)
        else:
            self._clock.after(cause, self.resume)
