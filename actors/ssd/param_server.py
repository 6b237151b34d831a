"""Reads params from the SSDs, once for all GPU workers.

It has no thread: each message is processed in the thread that brings it. A job with one GPU worker has the server in
that worker's process, and both call each other; else it is an actor of its own.
"""

import functools
import threading
from collections.abc import Callable

from windlass.actors.job import SCHEDULER, JobContext
from windlass.actors.messages import (
    ChunkIoDone,
    DescribeStatus,
    Message,
    ParamsArrived,
    ParamsCopied,
    ParamUse,
    RequestParams,
    StatusDescribed,
)
from windlass.actors.ssd.client import SsdClient, chunk_io
from windlass.actors.ssd.param_requests import param_turns
from windlass.actors.worker_policy import ParamActions
from windlass.storage.ids import ActorName, ChunkKey, Step


class ParamServer:
    """The actor that owns the slots of params."""

    def __init__(
        self,
        name: ActorName,
        context: JobContext,
        send: Callable[[ActorName, Message], None],
        *,
        io: SsdClient | None = None,
    ) -> None:
        """`send` sends messages to other actors and must not block. `io`: the client of the process, if it has one."""
        self.name = name
        self._context = context
        self._send = send
        self._io = io or SsdClient(name, context, send)
        self._lock = threading.Lock()  # of the following
        self._turns = param_turns(context)

    def post(self, message: Message) -> None:
        """Processes a message."""
        match message:
            case RequestParams():
                with self._lock:
                    actions = self._turns.request(message)
                self._do(actions)
            case ParamsCopied():
                with self._lock:
                    actions = self._turns.copied(message)
                self._do(actions)
            case ChunkIoDone():
                self._io.take(message)
            case DescribeStatus():
                text = "; ".join(filter(None, (self.describe(), self._io.describe_pending())))
                described = StatusDescribed(job=message.job, step=Step(0), actor=self.name, text=text)
                self._send(SCHEDULER, described)
            case _:
                raise ValueError(f"{self.name} has no handler for {type(message).__name__}")

    def describe(self) -> str:
        """Describes whom the oldest params in slots wait for; empty if no slot is in use."""
        with self._lock:
            return self._turns.describe()

    def stop(self) -> None:
        """Does nothing: the server has no thread and no file."""

    def _do(self, actions: ParamActions) -> None:
        job, kind = self._context.spec.job, self._context.formats.param_kind
        for actor, use, chunks in actions.arrived:
            self._send(actor, ParamsArrived(job=job, step=use.step, use=use, chunks=chunks))
        itemsizes = {kind: self._context.formats.itemsizes[kind]}
        for read in actions.reads:
            items = [
                chunk_io(key, self._context.chunk_numel(key), {kind: span.offset}, itemsizes)
                for key, span in read.spans.items()
            ]
            # More urgent than updates of later steps, and than the remaining updates of the step that made the params.
            self._io.read(items, read.step, (read.step, 0), functools.partial(self._arrived, read.use))

    def _arrived(self, use: ParamUse, key: ChunkKey) -> None:
        with self._lock:
            actions = self._turns.arrived(use, key)
        self._do(actions)
