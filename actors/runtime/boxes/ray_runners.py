"""The runners of a job over several boxes, each of which has a Ray of its own.

The first box's runner has the scheduler, and calls the actors of all boxes. The others serve it. The process of each
runner holds the box's link: it moves bytes between the other boxes and the arena, and passes messages on, which reach
the processes of its box over sockets. Only the scheduler, and the optimizer that exports the model, send messages to
actors of other boxes. Only the scheduler gets some.
"""

import contextlib
import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from windlass.actors.job import SCHEDULER, JobSpec, box_of, link_name, optimizer_name
from windlass.actors.messages import Message
from windlass.actors.runtime import (
    DuringWait,
    MessageServer,
    Outbox,
    RayBox,
    Runner,
    RunnerActor,
    clean_up,
    launch_runner,
    start_actors,
)
from windlass.actors.runtime.boxes.box_link import BoxLink, LinkConfig
from windlass.actors.runtime.boxes.other_boxes import REQUESTS, OtherBoxes, serve_box
from windlass.actors.scheduler import GOES_ON, INTERRUPTED
from windlass.engine.model import ModelLayout
from windlass.storage.ids import ActorName


class LeadRunner(Runner):
    """The runner of a job's first box. It trains as a runner of one box does, with the actors of all boxes."""

    def __init__(self, specs: Sequence[JobSpec], config: LinkConfig) -> None:
        """`specs`: those of all boxes, in their order."""
        super().__init__(specs[0])
        self._specs = specs
        self._config = config

    def _attempt(self) -> None:
        layout = self._read_layout()
        with contextlib.ExitStack() as ending:
            link = _start_link(self.spec, self._config, ending)
            boxes: list[RayBox] = []

            def during_wait(what: str) -> None:
                self._during_wait(what)
                for box in boxes:
                    box.check()

            others = OtherBoxes(link, self._config.names, during_wait=during_wait)
            outcome: dict[str, Any] = {"status": INTERRUPTED}
            try:
                mailboxes = {SCHEDULER: MessageServer(self._post).address}
                # This box's optimizer asks those of other boxes for what it exports.
                for spec in self._specs[1:]:
                    mover = optimizer_name(0, spec.box)
                    mailboxes[mover] = MessageServer(functools.partial(link.deliver, mover)).address
                here = _start_box(self.spec, layout, link, mailboxes, self._during_wait, ending)
                boxes.append(here)
                outcome = self._train_with(here, others, link, layout)
            finally:
                # Before this box stops its actors, so that all boxes do it at once.
                is_over, in_order = outcome["status"] not in GOES_ON, outcome["status"] != INTERRUPTED
                others.end(is_over=is_over, in_order=in_order)
            if in_order:
                here.stop_actors(is_over=is_over)

    def _train_with(self, here: RayBox, others: OtherBoxes, link: BoxLink, layout: ModelLayout) -> dict[str, Any]:
        contexts = others.contexts(self._specs, layout)
        specs = [self.spec, *(context.spec for context in contexts)]
        commit = start_actors(specs, functools.partial(others.call, here.call))
        elsewhere = Outbox(link.deliver)

        def send(to: ActorName, message: Message) -> None:
            (elsewhere if box_of(to) else here).send(to, message)

        def check() -> None:
            here.check()
            others.check()

        return self._train(here.context, send, commit, check, contexts)


class BoxRunner(RunnerActor):
    """The runner of a box that is not the first. It writes no journal: the first box has the attempt's outcome.

    Why it ends is in the box's file of errors, and the first box is told.
    """

    def __init__(self, spec: JobSpec, config: LinkConfig) -> None:
        super().__init__(spec)
        self._config = config

    def _attempt(self) -> None:
        layout = self._read_layout()
        with contextlib.ExitStack() as ending:
            link = _start_link(self.spec, self._config, ending)
            boxes: list[RayBox] = []

            def make_box(check_end: Callable[[], None]) -> RayBox:
                mailboxes = {SCHEDULER: MessageServer(functools.partial(link.deliver, SCHEDULER)).address}
                # The first box says what the job waits for.
                boxes.append(_start_box(self.spec, layout, link, mailboxes, lambda _: check_end(), ending))
                return boxes[0]

            end = serve_box(self.spec, link, make_box)
            for box in boxes:
                if end.in_order:
                    box.stop_actors(is_over=end.is_over)

    def _fail(self, error: Exception) -> None:
        self._note_error(traceback.format_exc())


def start_first_box_runner(specs: Sequence[JobSpec], config: LinkConfig) -> None:
    """Launches the first box's part of an attempt on the caller's node; see `start_box_runner`.

    `specs`: those of all boxes, in their order. Only this runner can be cancelled and paused.
    """
    launch_runner(LeadRunner, specs[0], tuple(specs), config)


def start_box_runner(spec: JobSpec, config: LinkConfig) -> None:
    """Launches another box's part of an attempt on the caller's node; Ray must be connected.

    Returns when it has begun. The runner is named like that of a job on one box, so the same calls find it.
    """
    launch_runner(BoxRunner, spec, spec, config)


def _start_link(spec: JobSpec, config: LinkConfig, ending: contextlib.ExitStack) -> BoxLink:
    link = BoxLink(spec, config.listen(), REQUESTS)
    ending.callback(clean_up, spec, link.stop)
    return link


def _start_box(
    spec: JobSpec,
    layout: ModelLayout,
    link: BoxLink,
    mailboxes: Mapping[ActorName, str],
    during_wait: DuringWait,
    ending: contextlib.ExitStack,
) -> RayBox:
    mailbox = MessageServer(link.post_all)
    box = RayBox.start(spec, layout, {**mailboxes, link_name(spec.box): mailbox.address}, during_wait)
    ending.callback(box.close)
    ending.callback(clean_up, spec, link.stop)  # before the arena is removed
    ending.callback(box.end_processes)
    link.open(box.arena, send=box.send, deliver=box.send)
    return box
