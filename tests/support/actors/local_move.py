"""Moves a job's states with all boxes in this process."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from windlass.actors.job.context import box_of
from windlass.actors.messages import Message
from windlass.actors.runtime.local_link import LocalLinks
from windlass.actors.runtime.moving.division import MoveSpec
from windlass.actors.runtime.moving.lead import LeadMove, Moved
from windlass.actors.runtime.moving.mover import Mover
from windlass.engine.model.layout import ModelLayout
from windlass.storage.ids import ActorName, LayoutEpoch
from windlass.storage.memory.arena import Arena

_Look = Callable[[int, object], None]


def move_locally(
    specs: Sequence[MoveSpec],
    layout: ModelLayout,
    *,
    direct: bool = True,
    on_message: _Look = lambda box, message: None,
) -> Moved:
    """Moves a job's states among boxes that are all in this process; see `LeadMove`. `specs`: as each box sees it.

    `on_message` is called with each message to or from a box's link. It is also called with the name of each method
    that the first box calls, before and after it. If it raises an error, the move ends as if the process had ended.
    """
    with contextlib.ExitStack() as ending:
        boxes = _LocalBoxes(specs, layout, ending, direct=direct, on_message=on_message)
        lead = LeadMove(specs[0], layout, boxes.call)
        try:
            return lead.run()
        except Exception:
            if lead.kept is not None:
                boxes.finish(lead.kept)
            raise


class _LocalBoxes:
    """The movers of all boxes, with a thread for each, and the link between them."""

    def __init__(
        self,
        specs: Sequence[MoveSpec],
        layout: ModelLayout,
        ending: contextlib.ExitStack,
        *,
        direct: bool,
        on_message: _Look,
    ) -> None:
        """`ending` closes what is opened."""
        self._on_message = on_message
        self._arenas: list[Any] = [None] * len(specs)
        self._links = LocalLinks(specs[0].any, self._arenas, self._answer)
        self._movers = [
            Mover(spec, layout, open_link=functools.partial(self._open_link, spec.box), direct=direct) for spec in specs
        ]
        for mover in self._movers:
            ending.callback(mover.close)
        ending.callback(self._links.stop)  # before the memory goes
        self._pool = ending.enter_context(ThreadPoolExecutor(len(specs)))

    def call(self, method: str, *arguments: object) -> list[Any]:
        """See CallMovers."""
        calls = [self._pool.submit(self._call_one, mover, method, arguments) for mover in self._movers]
        return [call.result() for call in calls]

    def finish(self, kept: LayoutEpoch) -> None:
        """Ends a move that has failed; see `Mover.finish`."""
        self._links.stop()
        for mover in self._movers:
            mover.finish(kept)

    def _call_one(self, mover: Mover, method: str, arguments: tuple[object, ...]) -> Any:
        try:
            self._tell(mover.spec.box, method)
            answer = getattr(mover, method)(*arguments)
            self._tell(mover.spec.box, f"{method} is done")
        except BaseException as error:
            self._fail_all(error)
            raise
        return answer

    def _open_link(self, box: int, arena: Arena) -> Callable[[Message], None]:
        self._arenas[box] = arena
        return functools.partial(self._post, box)

    def _post(self, box: int, message: Message) -> None:
        self._tell(box, message)
        self._links.post(box, message)

    def _answer(self, to: ActorName, message: Message) -> None:
        try:
            self._tell(box_of(to), message)
        except BaseException:  # noqa: BLE001 - all movers have failed of it, and the link's thread would only die
            return
        self._movers[box_of(to)].take(message)

    def _tell(self, box: int, message: object) -> None:
        try:
            self._on_message(box, message)
        except BaseException as error:
            self._fail_all(error)
            raise

    def _fail_all(self, error: BaseException) -> None:
        for mover in self._movers:
            mover.fail(error)
