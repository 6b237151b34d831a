"""Runs all actors of a job in one process: for tests, for the GPU check, and for machines without Ray."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from windlass.actors.job import JobSpec, SsdFacts, box_of
from windlass.actors.lifecycle import StopRequest
from windlass.actors.messages import Message
from windlass.actors.runtime.factory import LocalOptions
from windlass.actors.runtime.local_box import LocalBox
from windlass.actors.runtime.local_link import LocalLinks
from windlass.actors.runtime.start_up import START_DEADLINE_S, start_actors
from windlass.actors.scheduler import GOES_ON, Scheduler
from windlass.engine.model import Partition, dropouts_of, partition_folder
from windlass.storage.ids import ActorName
from windlass.storage.memory import Arena

# Connects boxes whose arenas exist; what it opens, the stack closes.
ConnectBoxes = Callable[[Sequence[LocalBox], Sequence[Arena], contextlib.ExitStack], None]


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
    connect: ConnectBoxes | None = None,
) -> dict[str, Any]:
    """Trains a job in this process, from its last commit if it has one, and returns its outcome.

    Without `ssds`, the SSDs' stored measurements are used, or new ones are made. `device`: that of all GPU workers, or
    one for each. `on_message` is called with every message between actors. With `stop`, another thread can end the
    attempt early. After an exception or a pause, the job's states stay on the SSDs.

    With `other_boxes`, the process stands for several boxes, and `spec` is that of the first one. Each box has SSDs, a
    directory for its arena, and blocks of its own (`JobSpec.stages`). `connect` connects them; without it, bytes and
    messages never leave the process.

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
    require_own_generators(partition, devices)
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
        (connect or connect_in_process)(boxes, [box.create_arena() for box in boxes], ending)
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


def connect_in_process(boxes: Sequence[LocalBox], arenas: Sequence[Arena], ending: contextlib.ExitStack) -> None:
    """Connects boxes whose bytes and messages never leave the process; `ending` undoes it."""

    def send(to: ActorName, message: Message) -> None:
        boxes[box_of(to)].send(to, message)

    if len(boxes) == 1:
        return
    links = LocalLinks(boxes[0].context.spec, arenas, send)
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


def require_own_generators(partition: Partition, devices: Sequence[str]) -> None:
    """Raises ValueError if GPU workers share a random generator, and the model has dropout."""
    generators = {"cpu" if torch.device(each).type == "cpu" else each for each in devices}
    if len(generators) < len(devices) and (found := dropouts_of(partition.model)):
        raise ValueError(
            f"{len(devices)} GPU workers in one process on {', '.join(sorted(generators))} share a random generator, "
            f"and the model has dropout ({found[0]}), so its gradients would be wrong: set it to 0, or give "
            "each worker a GPU of its own"
        )
