"""Simulates cores that several resources share: on a CPU, compute, updates and copies use the same ones.

The two directions of a link that slow each other down are modelled in the same way.

A task has a number of threads, and a duration with all of them running. If there are more threads than cores, all tasks
slow down alike, because the kernel gives every thread the same share. A task on one core counts as if it used all cores
for that time. Matrix products are split evenly, so all cores wait for the one that started late.
"""

from dataclasses import dataclass

from windlass.planner.simulation.clock import Clock, Future, Process


@dataclass(slots=True, eq=False)
class _Task:
    num_threads: float
    left_s: float  # remaining seconds at full speed
    done: Future


class SharedCores:
    """A pool of cores in simulated time."""

    def __init__(self, clock: Clock, num_cores: float) -> None:
        self._clock = clock
        self.num_cores = num_cores
        self._tasks: list[_Task] = []
        self._since_s = clock.now
        self._num_changes = 0

    def work(self, duration_s: float, num_threads: float) -> Process:
        """Takes `duration_s` if all its threads have a core, and longer if they must share."""
        if duration_s <= 0:
            return
        self._go_on()
        task = _Task(num_threads, duration_s, self._clock.future())
        self._tasks.append(task)
        self._wake_at_next_end()
        yield task.done

    @property
    def _speed(self) -> float:
        num_threads = sum(task.num_threads for task in self._tasks)
        return min(1.0, self.num_cores / num_threads) if num_threads else 1.0

    def _go_on(self) -> None:
        """Accounts for the work of all tasks since the last change."""
        done_s = (self._clock.now - self._since_s) * self._speed
        self._since_s = self._clock.now
        for task in self._tasks:
            task.left_s -= done_s

    def _wake_at_next_end(self) -> None:
        self._num_changes += 1
        if self._tasks:
            soonest = min(self._tasks, key=lambda task: task.left_s)
            end_s, change = max(0.0, soonest.left_s) / self._speed, self._num_changes
            self._clock.after(end_s, lambda: self._end(soonest, change))

    def _end(self, task: _Task, change: int) -> None:
        if change != self._num_changes:
            return  # another task began or ended in the meantime
        self._go_on()
        self._tasks.remove(task)
        task.done.set_done()
        self._wake_at_next_end()
