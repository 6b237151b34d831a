"""Runs steps one after the other in this process: `python -m windlass.service.preparation.sandbox.warm_server MODULE`.

The function `begin` of the module returns the function that runs a step, and keeps what one step can reuse of another.
Orders arrive over the socket at standard input: one JSON object each, with the step's log. The server answers each with
DONE. It ends with the socket's other end, or with an exception that a step raises.
"""

import gc
import importlib
import json
import os
import select
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

_MOST_NBYTES = 1 << 16  # of an order
_REST_S = 1.0  # seconds without an order after which the process looks at all that it holds
DONE = b"done"  # the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOrder:
    """The order for a step."""

    arguments: Sequence[str]
    home: str  # the working directory

    def to_message(self) -> bytes:
        """Encodes the order for the socket."""
        return json.dumps(asdict(self)).encode()


def main(module: str) -> None:
    """Serves until the socket's other end is closed."""
    orders = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    run: Callable[[Sequence[str]], None] = importlib.import_module(module).begin()
    while True:
        # What a step has left is looked at once, between two steps, and no more by Python's collector during the next.
        gc.collect()
        gc.freeze()
        if not select.select([orders], [], [], _REST_S)[0]:
            # What was there before may have become cycles that nothing uses. It takes longer to look at.
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        message, fds, _, _ = socket.recv_fds(orders, _MOST_NBYTES, 1)
        if not message:
            return
        (log_fd,) = fds
        _write_to(log_fd)
        os.close(log_fd)
        order = WarmOrder(**json.loads(message))
        os.chdir(order.home)
        os.environ["HOME"] = order.home
        run(order.arguments)
        sys.stdout.flush()
        # The log and the folder belong to the step, and may be deleted after it.
        _write_to(nothing)
        os.chdir("/")
        orders.send(DONE)


def _write_to(fd: int) -> None:
    for output in (1, 2):
        os.dup2(fd, output)


if __name__ == "__main__":
    main(sys.argv[1])
