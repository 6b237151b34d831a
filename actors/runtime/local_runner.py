"""Runs all actors of a job in one process: for tests, for the GPU check, and for machines without Ray."""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from windlass.actors.job import SCHEDULER, JobSpec, SsdFacts, keeping_kernel
from windlass.actors.lifecycle import StopRequest
from windlass.actors.messages import ActorFailed, Message
from windlass.actors.runtime.factory import LocalOptions, build_actor
from windlass.actors.runtime.start_up import START_DEADLINE_S, open_attempt, set_up_actors
from windlass.actors.scheduler import GOES_ON, Scheduler
from windlass.engine.model import Partition, partition_folder
from windlass.storage.ids import ActorName
from windlass.storage.store import CommitRecord


def run_local(
    spec: JobSpec,
    *,
    partition: Partition | None = None,
    device: str = "cpu",
    poison_released: bool = False,
    direct: bool = True,
    ssds: tuple[SsdFacts, ...] | None = None,
    on_message: Callable[[ActorName, Message], None] | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Trains a job in this process, from its last commit if it has one, and returns its outcome.

    Without `ssds`, the SSDs' stored measurements are used, or new ones are made. `on_message` is called with every
    message between actors. With `stop`, another thread can end the attempt early. After an exception or a pause, the
    job's states stay on the SSDs.

    Raises:
        TimeoutError: the attempt is over and its outcome is in the journal, but some of its threads hang.
    """
    partition = partition or partition_folder(spec.model_dir, spec.training.precision)
    context, arena = open_attempt(spec, partition.layout, direct=direct, ssds=ssds)
    options = LocalOptions(partition=partition, device=device, poison_released=poison_released, direct=direct)
    actors: dict[ActorName, Any] = {}
    early: list[Message] = []  # to the scheduler, before there is one
    lock = threading.Lock()  # of `early`, and of the scheduler's arrival in `actors`
    is_over = False

    def send(to: ActorName, message: Message) -> None:
        if on_message is not None:
            on_message(to, message)
        with lock:
            if to == SCHEDULER and to not in actors:
                early.append(message)
                return
        try:
            actors[to].post(message)
        except Exception as error:  # noqa: BLE001 - the receiver's error; the sender does not wait for an answer
            send(SCHEDULER, ActorFailed.of(error, actor=to, about=message))

    def set_up(name: ActorName, commit: CommitRecord | None = None) -> None:
        """Builds an actor and starts it. SSD servers are set up before the commit is known."""
        actors[name] = build_actor(name, keeping_kernel(context, commit), send, local=options)
        actors[name].setup()
        ending.callback(end, name)

    def call(
        names: Sequence[ActorName], method: str, *arguments: Any, deadline_s: float = START_DEADLINE_S
    ) -> dict[ActorName, Any]:
        methods = {
            name: functools.partial(set_up, name) if method == "setup" else getattr(actors[name], method)
            for name in names
        }
        return {name: methods[name](*arguments) for name in names}

    def end(name: ActorName) -> None:
        if name.startswith("ssd-"):
            actors[name].stop(delete_store=is_over, deadline_s=spec.deadline_s)
        else:
            actors[name].stop()

    # If one actor hangs at the end, all others are still stopped and the arena is still removed.
    with contextlib.ExitStack() as ending:
        ending.callback(arena.unlink)
        ending.callback(arena.close)
        commit = set_up_actors(spec, call)
        scheduler = Scheduler(context, send, resume_from=commit, stop=stop)
        with lock:
            for message in early:
                scheduler.post(message)
            actors[SCHEDULER] = scheduler
        outcome = scheduler.run()
        is_over = outcome["status"] not in GOES_ON
    return outcome
