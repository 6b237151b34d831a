"""Runs all actors of a job in one process: for tests, for the GPU check, and for machines without Ray."""

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from windlass.actors.job import SCHEDULER, JobSpec, SsdFacts, box_of, link_name
from windlass.actors.lifecycle import StopRequest
from windlass.actors.messages import ActorFailed, Message
from windlass.actors.runtime.box_link import BoxLink, LinkEnd
from windlass.actors.runtime.factory import LocalOptions, open_space, read_journal, start_actor, stop_actor
from windlass.actors.runtime.local_link import LocalLinks
from windlass.actors.runtime.start_up import START_DEADLINE_S, create_arena, node_of_all, plan_attempt, start_actors
from windlass.actors.scheduler import GOES_ON, Scheduler
from windlass.engine.device import memory_node
from windlass.engine.model import Partition, dropouts_of, partition_folder
from windlass.storage.ids import ActorName
from windlass.storage.store import CommitRecord, JobSpace, StoreJournal


def run_local(
    spec: JobSpec,
    *,
    partition: Partition | None = None,
    device: str | Sequence[str] = "cpu",
    poison_released: bool = False,
    direct: bool = True,
    ssds: tuple[SsdFacts, ...] | None = None,
    on_message: Callable[[ActorName, Message], None] | None = None,
    stop: StopRequest | None = None,
    other_boxes: Sequence[JobSpec] = (),
    link_ends: Sequence[LinkEnd] = (),
) -> dict[str, Any]:
    """Trains a job in this process, from its last commit if it has one, and returns its outcome.

    Without `ssds`, the SSDs' stored measurements are used, or new ones are made. `device`: that of all GPU workers, or
    one for each. `on_message` is called with every message between actors. With `stop`, another thread can end the
    attempt early. After an exception or a pause, the job's states stay on the SSDs.

    With `other_boxes`, the process stands for several boxes, and `spec` is that of the first one. Each box has SSDs, a
    directory for its arena, and blocks of its own (`JobSpec.stages`). With `link_ends`, one for each box, bytes and
    messages go from box to box over sockets. Without, they never leave the process.

    GPU workers on one device, or on the CPU, are threads with one random generator. So there the model may have no
    dropout. Dropout is known from the config and from modules, not if a number in the code of a layer sets it.

    Raises:
        ValueError: several GPU workers would share a random generator, and the model has dropout.
        TimeoutError: the attempt is over and its outcome is in the journal, but some of its threads hang.
    """
    partition = partition or partition_folder(spec.model_dir, spec.training.precision)
    specs = (spec, *other_boxes)
    if [each.box for each in specs] != list(range(max(1, len(spec.stages)))):
        raise ValueError(f"the job has {len(spec.stages)} stages, and there are specifications for {len(specs)} boxes")
    num_workers = sum(each.num_ranks for each in specs)
    devices = (device,) * num_workers if isinstance(device, str) else tuple(device)
    _require_own_generators(partition, devices)
    contexts = [plan_attempt(each, partition.layout, direct=direct, ssds=ssds) for each in specs]
    node = node_of_all(memory_node(torch.device(each)) for each in devices)
    # Before an actor changes the model.
    partitions = (partition, *(copy.deepcopy(partition) for _ in range(1, num_workers)))
    options = _options_of_boxes(
        specs, LocalOptions(partitions=partitions, devices=devices, poison_released=poison_released, direct=direct)
    )
    actors: dict[ActorName, Any] = {}
    spaces: dict[ActorName, JobSpace] = {}  # of SSD servers that have not started
    early: list[Message] = []  # to the scheduler, before there is one
    lock = threading.Lock()  # of `early`, and of the scheduler's arrival in `actors`
    is_over = False

    def send(to: ActorName, message: Message) -> None:
        """Sends a message to an actor of the same box."""
        with lock:
            if to == SCHEDULER and to not in actors:
                early.append(message)
                return
        try:
            actors[to].post(message)
        except Exception as error:  # noqa: BLE001 - the receiver's error; the sender does not wait for an answer
            send_from(box_of(to))(SCHEDULER, ActorFailed.of(error, actor=to, about=message))

    def send_from(box: int) -> Callable[[ActorName, Message], None]:
        def send_to(to: ActorName, message: Message) -> None:
            if on_message is not None:
                on_message(to, message)
            if box == box_of(to) or not link_ends:
                send(to, message)
            else:
                actors[link_name(box)].forward(to, [message])

        return send_to

    def read_journal_of(name: ActorName) -> StoreJournal:
        return read_journal(name, contexts[box_of(name)], direct=direct)

    def open_space_of(name: ActorName) -> StoreJournal:
        spaces[name] = open_space(name, contexts[box_of(name)], direct=direct)
        return spaces[name].journal()

    def start(name: ActorName, commit: CommitRecord | None) -> None:
        box = box_of(name)
        actors[name] = start_actor(
            name, contexts[box], commit, send_from(box), space=spaces.pop(name, None), local=options[box]
        )
        ending.callback(end, name)

    def call(
        names: Sequence[ActorName], method: str, *arguments: Any, deadline_s: float = START_DEADLINE_S
    ) -> dict[ActorName, Any]:
        methods: dict[str, Callable[..., Any]] = {
            "read_journal": read_journal_of,
            "open_space": open_space_of,
            "start": start,
        }
        return {name: methods[method](name, *arguments) for name in names}

    def close_spaces() -> None:
        for space in spaces.values():
            space.close()

    def end(name: ActorName) -> None:
        stop_actor(name, actors[name], is_over=is_over)

    # If one actor hangs at the end, all others are still stopped and the arenas are still removed.
    with contextlib.ExitStack() as ending:
        arenas = []
        for context in contexts:
            arenas.append(arena := create_arena(context, node))
            ending.callback(arena.unlink)
            ending.callback(arena.close)
        ending.callback(close_spaces)
        if link_ends:
            for box, link_end in enumerate(link_ends):
                actors[link_name(box)] = link = BoxLink(contexts[box], arenas[box], link_end, send_from(box))
                ending.callback(link.stop)
        elif other_boxes:
            links = LocalLinks(contexts, arenas, send_from(0))
            ending.callback(links.stop)
            actors |= {link_name(box): links.of(box) for box in range(len(specs))}
        commit = start_actors(specs, call)
        scheduler = Scheduler(contexts[0], send_from(0), resume_from=commit, stop=stop, others=contexts[1:])
        with lock:
            for message in early:
                scheduler.post(message)
            actors[SCHEDULER] = scheduler
        outcome = scheduler.run()
        is_over = outcome["status"] not in GOES_ON
    return outcome


def _options_of_boxes(specs: Sequence[JobSpec], options: LocalOptions) -> list[LocalOptions]:
    """Returns the options of each box's actors."""
    found, start = [], 0
    for spec in specs:
        stop = start + spec.num_ranks
        own = dataclasses.replace(
            options, partitions=options.partitions[start:stop], devices=options.devices[start:stop]
        )
        found.append(own)
        start = stop
    return found


def _require_own_generators(partition: Partition, devices: Sequence[str]) -> None:
    """Raises ValueError if GPU workers share a random generator, and the model has dropout."""
    generators = {"cpu" if torch.device(each).type == "cpu" else each for each in devices}
    if len(generators) < len(devices) and (found := dropouts_of(partition.model)):
        raise ValueError(
            f"{len(devices)} GPU workers in one process on {', '.join(sorted(generators))} share a random generator, "
            f"and the model has dropout ({found[0]}), so its gradients would be wrong: set it to 0, or give "
            "each worker a GPU of its own"
        )
