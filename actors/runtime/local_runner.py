"""Runs all actors of a job in one process: for tests, for the GPU check, and for machines without Ray."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from windlass.actors.job import JobSpec, SsdFacts, box_of
from windlass.actors.lifecycle import StopRequest
from windlass.actors.messages import Message
from windlass.actors.runtime.box_link import BoxLink, LinkEnd
from windlass.actors.runtime.boxes import REQUESTS, OtherBoxes, serve_box
from windlass.actors.runtime.factory import LocalOptions
from windlass.actors.runtime.local_box import LocalBox
from windlass.actors.runtime.local_link import LocalLinks
from windlass.actors.runtime.start_up import START_DEADLINE_S, start_actors
from windlass.actors.scheduler import GOES_ON, Scheduler
from windlass.engine.model import Partition, dropouts_of, partition_folder
from windlass.storage.ids import ActorName
from windlass.storage.memory import Arena


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
    # Before an actor changes the model.
    partitions = (partition, *(copy.deepcopy(partition) for _ in range(1, num_workers)))
    options = _options_of_boxes(
        specs, LocalOptions(partitions=partitions, devices=devices, poison_released=poison_released, direct=direct)
    )
    boxes = [
        LocalBox(each, partition.layout, own, ssds=ssds, on_message=on_message)
        for each, own in zip(specs, options, strict=True)
    ]

    def call(
        names: Sequence[ActorName], method: str, *arguments: Any, deadline_s: float = START_DEADLINE_S
    ) -> dict[ActorName, Any]:
        return {name: boxes[box_of(name)].call([name], method, *arguments)[name] for name in names}

    # If one actor hangs at the end, all others are still stopped and the arenas are still removed.
    with contextlib.ExitStack() as ending:
        for box in boxes:
            ending.callback(box.close)
        _link(boxes, [box.create_arena() for box in boxes], link_ends, ending)
        for box in boxes:
            ending.callback(box.stop_actors)
        commit = start_actors(specs, call)
        context, *others = (box.context for box in boxes)
        scheduler = Scheduler(context, boxes[0].send, resume_from=commit, stop=stop, others=others)
        boxes[0].add_scheduler(scheduler)
        outcome = scheduler.run()
        for box in boxes:
            box.is_over = outcome["status"] not in GOES_ON
    return outcome


def run_local_box(
    specs: Sequence[JobSpec],
    box: int,
    end: LinkEnd,
    *,
    partition: Partition | None = None,
    direct: bool = True,
    on_message: Callable[[ActorName, Message], None] | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any] | None:
    """Runs one box's part of an attempt in this process, on the CPU; the other boxes are other processes.

    `specs`: those of all boxes. `box`: the index of this one. For the others see `run_local`. Returns the outcome on
    the first box, None on the others.

    Raises:
        ActorLostError: another box is lost.
        BoxFailedError: another box cannot start.
    """
    spec = specs[box]
    partition = partition or partition_folder(spec.model_dir, spec.training.precision)
    devices = ("cpu",) * spec.num_ranks
    _require_own_generators(partition, devices)
    partitions = (partition, *(copy.deepcopy(partition) for _ in range(1, spec.num_ranks)))
    options = LocalOptions(partitions=partitions, devices=devices, poison_released=False, direct=direct)
    with contextlib.ExitStack() as ending:
        link = BoxLink(spec, end, REQUESTS)
        ending.callback(link.stop)
        boxes: list[LocalBox] = []

        def make_box() -> LocalBox:
            made = LocalBox(spec, partition.layout, options, on_message=on_message)
            ending.callback(made.close)
            arena = made.create_arena()
            ending.callback(link.stop)  # before the arena is removed
            made.add_link(link, link.send)
            link.open(arena, send=made.send, deliver=made.deliver)
            ending.callback(made.stop_actors)
            boxes.append(made)
            return made

        if box:
            is_over = serve_box(spec, link, make_box)
            boxes[0].is_over = is_over
            return None
        others, is_over = OtherBoxes(link, end.names), False
        try:
            here = make_box()
            contexts = others.contexts(specs[1:], partition.layout)
            commit = start_actors(specs, functools.partial(others.call, here.call))
            scheduler = Scheduler(
                here.context, here.send, resume_from=commit, check_actors=others.check, stop=stop, others=contexts
            )
            here.add_scheduler(scheduler)
            outcome = scheduler.run()
            here.is_over = is_over = outcome["status"] not in GOES_ON
        finally:
            others.end(is_over=is_over)
    return outcome


def _link(
    boxes: Sequence[LocalBox], arenas: Sequence[Arena], link_ends: Sequence[LinkEnd], ending: contextlib.ExitStack
) -> None:
    """Gives each of several boxes a link, which `ending` stops."""
    if link_ends:
        for box, arena, end in zip(boxes, arenas, link_ends, strict=True):
            link = BoxLink(box.context.spec, end)
            ending.callback(link.stop)
            box.add_link(link, link.send)
            link.open(arena, send=box.send, deliver=box.deliver)
    elif len(boxes) > 1:

        def send(to: ActorName, message: Message) -> None:
            boxes[box_of(to)].send(to, message)

        links = LocalLinks([box.context for box in boxes], arenas, send)
        ending.callback(links.stop)
        for index, box in enumerate(boxes):
            box.add_link(links.of(index), lambda to, message: boxes[box_of(to)].deliver(to, message))


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
