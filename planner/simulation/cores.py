"""Simulates cores that several resources share: on a CPU, compute, updates and copies use the same ones.

The two directions of a link that slow each other down are modelled in the same way.

A task has a number of threads, and a duration with all of them running. If there are more threads than cores, all tasks
slow down alike, because the kernel gives every thread the same share. A task on one core counts as if it used all cores
for that time. Matrix products are split evenly, so all cores wait for the one that started late.
"""

import functools
import heapq

from windlass.planner.simulation.clock import Clock, Future

# A task: its end in progress (see below), the order of arrival, its threads, and the event of its end.
_Task = tuple[float, int, float, Future]


class SharedCores:
    """A pool of cores in simulated time.

    All tasks have the same speed. So what is left of one is known from the *progress*: the seconds that a task would
    have got since the start, at full speed. A task ends at its progress of the beginning and its duration.
    """

    def __init__(self, clock: Clock, num_cores: float) -> None:
        self._clock = clock
        self.num_cores = num_cores
        self._tasks: list[_Task] = []  # a heap
        self._num_threads = 0.0  # of all tasks
        self._num_begun = 0
        self._progress_s = 0.0  # at `_since_s`
        self._since_s = clock.now
        self._speed = 1.0
        self._num_ends = 0  # number of ends scheduled so far; only the last one is valid

    def work(self, duration_s: float, num_threads: float) -> tuple[Future, ...]:
        """Begins a task, and returns the event of its end; nothing if it takes no time.

        It takes `duration_s` if all its threads have a core, and longer if they must share.
        """
        if duration_s <= 0:
            return ()
        speed = self._speed
        self._go_on()
        done = Future(self._clock)
        self._num_begun += 1
        task = (self._progress_s + duration_s, self._num_begun, num_threads, done)
        heapq.heappush(self._tasks, task)
        self._num_threads += num_threads
        self._adapt_speed()
        if self._speed != speed or self._tasks[0] is task:
            self._end_soonest()
        return (done,)

    def _adapt_speed(self) -> None:
        """Adapts the speed to the number of threads."""
        num_threads, num_cores = self._num_threads, self.num_cores
        self._speed = 1.0 if num_threads <= num_cores else num_cores / num_threads

    def _go_on(self) -> None:
        """Accounts for the work of all tasks since the last change."""
        now_s = self._clock.now
        self._progress_s += (now_s - self._since_s) * self._speed
        self._since_s = now_s

    def _end_soonest(self) -> None:
        """Schedules the end of the task that ends first, in place of what was scheduled before."""
        self._num_ends += 1
        left_s = self._tasks[0][0] - self._progress_s
        self._clock.after(left_s / self._speed if left_s > 0 else 0.0, functools.partial(self._end, self._num_ends))

    def _end(self, number: int) -> None:
        if number != self._num_ends:
            return  # another task began or ended in the meantime
        self._go_on()
        _, _, num_threads, done = heapq.heappop(self._tasks)
        done.set_done()
        if self._tasks:
            self._num_threads -= num_threads
            self._adapt_speed()
            self._end_soonest()
        else:  # sums of fractions have rounding errors, which must not add up
            self._num_threads, self._progress_s, self._speed = 0.0, 0.0, 1.0
