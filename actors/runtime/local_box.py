"""The actors of a job on one box, all in this process: for tests, for the GPU check, and for machines without Ray."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from windlass.actors.job import SCHEDULER, JobSpec, SsdFacts, box_of, link_name
from windlass.actors.messages import ActorFailed, Message
from windlass.actors.runtime.factory import LocalOptions, open_space, read_journal, start_actor, stop_actor
from windlass.actors.runtime.start_up import START_DEADLINE_S, create_arena, free_memory_of, node_of_all, plan_attempt
from windlass.engine.device import memory_node
from windlass.engine.model import ModelLayout
from windlass.storage.ids import ActorName
from windlass.storage.memory import Arena
from windlass.storage.store import CommitRecord, JobSpace, StoreJournal

Send = Callable[[ActorName, Message], None]


class LocalBox:
    """The actors of one box. They are made by `call`, in the order of `start_actors`."""

    def __init__(
        self,
        spec: JobSpec,
        layout: ModelLayout,
        options: LocalOptions,
        *,
        ssds: tuple[SsdFacts, ...] | None = None,
        on_message: Send | None = None,
    ) -> None:
        """Plans the attempt, and creates no arena yet. See `run_local` for the parameters."""
        self.free_nbytes = free_memory_of(spec)
        self.context = plan_attempt(spec, layout, direct=options.direct, ssds=ssds, free_nbytes=self.free_nbytes)
        self.is_over = False  # the job is, so SSD servers delete its states when they stop
        self._spec, self._options, self._on_message = spec, options, on_message
        self._send_elsewhere: Send | None = None
        self._actors: dict[ActorName, Any] = {}
        self._spaces: dict[ActorName, JobSpace] = {}  # of SSD servers that have not started
        self._early: list[Message] = []  # to the scheduler, before there is one
        self._lock = threading.Lock()  # of `_early`, and of the scheduler's arrival in `_actors`
        self._started = contextlib.ExitStack()  # stops the actors
        self._arena = contextlib.ExitStack()  # removes the arena

    def create_arena(self) -> Arena:
        """Creates the arena, and returns it. `close` removes it."""
        node = node_of_all(memory_node(torch.device(each)) for each in self._options.devices)
        arena = create_arena(self.context, node)
        self._arena.callback(arena.unlink)
        self._arena.callback(arena.close)
        return arena

    def add_link(self, link: Any, send: Send) -> None:
        """Adds the box's link, before the first actor is started. `send`: to actors of other boxes.

        The caller stops it, after `stop_actors` and before `close`.
        """
        self._actors[link_name(self._spec.box)], self._send_elsewhere = link, send

    def add_scheduler(self, scheduler: Any) -> None:
        """Adds the scheduler, which gets the messages to it so far, and later ones. The caller stops it."""
        with self._lock:
            for message in self._early:
                scheduler.post(message)
            self._actors[SCHEDULER] = scheduler

    def send(self, to: ActorName, message: Message) -> None:
        """Sends a message of an actor of this box."""
        if self._on_message is not None:
            self._on_message(to, message)
        if self._send_elsewhere is not None and box_of(to) != self._spec.box:
            # The loss of the other box is told by the link, and its end by the first box.
            with contextlib.suppress(ConnectionError):
                self._send_elsewhere(to, message)
        else:
            self.deliver(to, message)

    def deliver(self, to: ActorName, message: Message) -> None:
        """Passes a message to an actor of this box. An error of the receiver is sent to the scheduler."""
        with self._lock:
            if to == SCHEDULER and to not in self._actors:
                self._early.append(message)
                return
        try:
            self._actors[to].post(message)
        except Exception as error:  # noqa: BLE001 - the receiver's error; the sender does not wait for an answer
            self.send(SCHEDULER, ActorFailed.of(error, actor=to, about=message))

    def call(
        self, names: Sequence[ActorName], method: str, *arguments: Any, deadline_s: float = START_DEADLINE_S
    ) -> dict[ActorName, Any]:
        """See CallActors."""
        methods: dict[str, Callable[..., Any]] = {
            "read_journal": self._read_journal,
            "open_space": self._open_space,
            "start": self._start,
        }
        return {name: methods[method](name, *arguments) for name in names}

    def check(self) -> None:
        """See Box. All actors are in this process."""

    def stop_actors(self) -> None:
        """Stops all actors that were started.

        If one hangs, all others are still stopped, and TimeoutError is raised.
        """
        with self._started:
            self._close_spaces()

    def close(self) -> None:
        """Removes the arena."""
        self._arena.close()

    def _read_journal(self, name: ActorName) -> StoreJournal:
        return read_journal(name, self.context, direct=self._options.direct)

    def _open_space(self, name: ActorName) -> StoreJournal:
        self._spaces[name] = open_space(name, self.context, direct=self._options.direct)
        return self._spaces[name].journal()

    def _start(self, name: ActorName, commit: CommitRecord | None) -> None:
        space = self._spaces.pop(name, None)
        self._actors[name] = start_actor(name, self.context, commit, self.send, space=space, local=self._options)
        self._started.callback(self._stop, name)

    def _stop(self, name: ActorName) -> None:
        stop_actor(name, self._actors[name], is_over=self.is_over)

    def _close_spaces(self) -> None:
        for space in self._spaces.values():
            space.close()
