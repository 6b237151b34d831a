"""Cores that several simulated resources share: where the device is the CPU, what is computed, updated and copied has
the same ones. The two ways of a link that slow each other down share it in the same manner.

Work says how many threads it has and how long it takes with all of them running. While there are more threads than
cores, all work slows down alike: the kernel gives every thread the same share. Whoever takes one core counts as if it
took all of them for as long: products are split evenly, and all cores wait for the one that began late.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy


@dataclass(slots=True, eq=False)
class _Task:
    num_threads: float
    left_s: float  # as if alone
    done: simpy.Event


class SharedCores:
    """In simulated time."""

    def __init__(self, env: simpy.Environment, num_cores: float) -> None:
        self._env = env
        self.num_cores = num_cores
        self._tasks: list[_Task] = []
        self._since_s = env.now
        self._num_changes = 0

    def work(self, duration_s: float, num_threads: float) -> Generator[simpy.Event, Any, None]:
        """Takes `duration_s` with all its threads running, longer where they must share."""
        if duration_s <= 0:
            return
        self._go_on()
        task = _Task(num_threads, duration_s, self._env.event())
        self._tasks.append(task)
        self._wake_at_next_end()
        yield task.done

    @property
    def _speed(self) -> float:
        num_threads = sum(task.num_threads for task in self._tasks)
        return min(1.0, self.num_cores / num_threads) if num_threads else 1.0

    def _go_on(self) -> None:
        """All have worked since the last change."""
        done_s = (self._env.now - self._since_s) * self._speed
        self._since_s = self._env.now
        for task in self._tasks:
            task.left_s -= done_s

    def _wake_at_next_end(self) -> None:
        self._num_changes += 1
        if self._tasks:
            soonest = min(self._tasks, key=lambda task: task.left_s)
            end, change = self._env.timeout(max(0.0, soonest.left_s) / self._speed), self._num_changes
            end.callbacks.append(lambda _: self._end(soonest, change))

    def _end(self, task: _Task, change: int) -> None:
        if change != self._num_changes:
            return  # something else began or ended meanwhile
        self._go_on()
        self._tasks.remove(task)
        task.done.succeed()
        self._wake_at_next_end()
