"""Moves a job's states with all boxes in this process: for tests, and for machines without Ray."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from windlass.actors.job import box_of
from windlass.actors.messages import Message
from windlass.actors.runtime import LocalLinks
from windlass.actors.runtime.moving.division import MoveSpec
from windlass.actors.runtime.moving.lead import LeadMove, Moved
from windlass.actors.runtime.moving.mover import Mover
from windlass.engine.model import ModelLayout
from windlass.storage.ids import ActorName
from windlass.storage.memory import Arena


def move_locally(
    specs: Sequence[MoveSpec],
    layout: ModelLayout,
    *,
    direct: bool = True,
    on_message: Callable[[int, object], None] = lambda box, message: None,
) -> Moved:
    """Moves a job's states among boxes that are all in this process; see `LeadMove`. `specs`: as each box sees it.

    `on_message` is called with each message to or from a box's link, and with the name of each method that the first
    box calls, before and after it. An error that it raises ends the move as the end of the process would.
    """
    with contextlib.ExitStack() as ending:
        arenas: list[Any] = [None] * len(specs)
        movers: list[Mover] = []

        def tell(box: int, message: object) -> None:
            try:
                on_message(box, message)
            except BaseException as error:  # in a thread that would die of it
                for mover in movers:
                    mover.fail(error)
                raise

        def answer(to: ActorName, message: Message) -> None:
            tell(box_of(to), message)
            movers[box_of(to)].take(message)

        links = LocalLinks(specs[0].any, arenas, answer)

        def open_link(box: int, arena: Arena) -> Callable[[Message], None]:
            arenas[box] = arena

            def post(message: Message) -> None:
                tell(box, message)
                links.post(box, message)

            return post

        for spec in specs:
            movers.append(Mover(spec, layout, open_link=functools.partial(open_link, spec.box), direct=direct))
            ending.callback(movers[-1].close)
        ending.callback(links.stop)
        pool = ending.enter_context(ThreadPoolExecutor(len(specs)))

        def call(method: str, *arguments: object) -> list[Any]:
            def call_one(mover: Mover) -> Any:
                try:
                    tell(mover.spec.box, method)
                    answer = getattr(mover, method)(*arguments)
                    tell(mover.spec.box, f"{method} is done")
                except BaseException as error:
                    for each in movers:
                        each.fail(error)
                    raise
                return answer

            return [future.result() for future in [pool.submit(call_one, mover) for mover in movers]]

        lead = LeadMove(specs[0], layout, call)
        try:
            return lead.run()
        except Exception:
            if lead.kept is not None:
                links.stop()
                for mover in movers:
                    mover.finish(lead.kept)
            raise
