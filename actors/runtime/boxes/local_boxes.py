"""Runs one box's part of a job over several boxes without Ray, in a process of its own."""

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from windlass.actors.job import JobSpec
from windlass.actors.messages import Message
from windlass.actors.runtime import LocalBox, LocalOptions, require_own_generators, start_actors
from windlass.actors.runtime.boxes.box_link import BoxLink, LinkEnd
from windlass.actors.runtime.boxes.other_boxes import REQUESTS, OtherBoxes, serve_box
from windlass.actors.scheduler import GOES_ON, INTERRUPTED, Scheduler
from windlass.engine.model import partition_folder
from windlass.storage.ids import ActorName


def run_local_box(
    specs: Sequence[JobSpec],
    box: int,
    end: LinkEnd,
    *,
    direct: bool = True,
    on_message: Callable[[ActorName, Message], None] | None = None,
) -> dict[str, Any] | None:
    """Runs one box's part of an attempt in this process, on the CPU; the other boxes are other processes.

    `specs`: those of all boxes. `box`: the index of this one. For the others see `run_local`. Returns the outcome on
    the first box, None on the others.

    Raises:
        ActorLostError: another box is lost.
        BoxFailedError: another box cannot start.
    """
    spec = specs[box]
    partition = partition_folder(spec.model_dir, spec.training.precision)
    devices = ("cpu",) * spec.num_ranks
    require_own_generators(partition, devices)
    partitions = (partition, *(copy.deepcopy(partition) for _ in range(1, spec.num_ranks)))
    options = LocalOptions(partitions=partitions, devices=devices, poison_released=False, direct=direct)
    with contextlib.ExitStack() as ending:
        link = BoxLink(spec, end, REQUESTS)
        ending.callback(link.stop)
        boxes: list[LocalBox] = []

        def make_box(check_end: Callable[[], None] | None = None) -> LocalBox:
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
            end_of_attempt = serve_box(spec, link, make_box)
            for made in boxes:
                made.is_over = end_of_attempt.is_over
            return None
        others, is_over, in_order = OtherBoxes(link, end.names), False, False
        try:
            here = make_box()
            contexts = others.contexts(specs, partition.layout)
            all_specs = [spec, *(context.spec for context in contexts)]
            commit = start_actors(all_specs, functools.partial(others.call, here.call))
            scheduler = Scheduler(
                here.context, here.send, resume_from=commit, check_actors=others.check, others=contexts
            )
            here.add_scheduler(scheduler)
            outcome = scheduler.run()
            here.is_over = is_over = outcome["status"] not in GOES_ON
            in_order = outcome["status"] != INTERRUPTED
        finally:
            others.end(is_over=is_over, in_order=in_order)
    return outcome
