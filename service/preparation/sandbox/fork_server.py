"""A fork server: runs steps of preparations in processes that need not import anything.

`python -m windlass.service.preparation.sandbox.fork_server MODULES`: importing torch and transformers takes seconds.
This process does it once, and forks for each step. It reads no users' files and holds no secrets. A forked process
reads them, under the limits of this one (see `limited_exec`) and those of its step.

Orders arrive over the socket at standard input: one JSON object each, with the step's log and one end of the step's
link. The server sends the process's id and then its exit code over the link. HALT and CONTINUE, sent to the server,
stop and continue the process. If the other end is shut down or closed, the server kills the process. The forked process
holds the link too. So the link ends without a code only if both processes are gone.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from windlass.actors.lifecycle import UNUSED_BY_MODELS, die_with_parent, hide_packages
from windlass.service.preparation.sandbox.limited_exec import limit

_MOST_NBYTES = 1 << 16  # of an order
HALT, CONTINUE = b"halt", b"continue"  # messages to the server over a link
PID = "pid "  # prefix of the message with the process's id
CANNOT_FORK = 3  # exit code: an import has started threads, and another start would change nothing


class ThreadedServerError(RuntimeError):
    """An import has started threads. A process forked now could wait forever for locks that these hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """The order for a forked process."""

    module: str  # imported by the server; its `main` is called
    arguments: Sequence[str]
    home: str  # its working directory
    cpu_s: int  # limit of its CPU time
    address_space_nbytes: int  # limit of its address space
    memory_nbytes: int | None  # limit of its own memory

    def to_message(self) -> bytes:
        """Encodes the order for the socket."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forked:
    pid: int
    pid_fd: int  # readable once the process has ended
    link: socket.socket


def main(modules: Sequence[str]) -> None:
    """Serves until all order sockets are closed. A forked process runs its step instead."""
    orders = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    hide_packages(UNUSED_BY_MODELS)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # else each forked process copies the pages that its first garbage collection touches
    try:
        _require_one_thread()  # before the first order, so that it need not begin anew
        order = serve(orders)
    except ThreadedServerError as error:
        print(error, flush=True)
        sys.exit(CANNOT_FORK)
    if order is not None:
        sys.argv = [order.module, *order.arguments]
        sys.modules[order.module].main()
        sys.stdout.flush()
        os._exit(0)  # with torch loaded, Python's own exit takes a second, and nothing is left to do


def serve(orders: socket.socket) -> StepOrder | None:
    """Serves orders. Returns the order in each forked process, and None in the server at the end."""
    server_pid = os.getpid()
    all_forked: list[_Forked] = []
    while True:
        ready = _wait_for([orders.fileno(), *(fd for each in all_forked for fd in (each.pid_fd, each.link.fileno()))])
        for each in tuple(all_forked):
            if each.pid_fd in ready:
                all_forked.remove(each)
                _tell_end(each)
            elif each.link.fileno() in ready:
                # the pid is valid, because the process was not waited for yet
                os.kill(each.pid, _signal_for(each.link))
        if orders.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(orders, _MOST_NBYTES, 2)
        if not message:
            return None
        order, (log_fd, link_fd) = StepOrder(**json.loads(message)), fds
        _require_one_thread()
        pid = os.fork()
        if pid == 0:
            for each in all_forked:
                _close(each)
            orders.close()
            _become(order, log_fd, server_pid)
            return order
        os.close(log_fd)
        forked = _Forked(pid=pid, pid_fd=os.pidfd_open(pid), link=socket.socket(fileno=link_fd))
        all_forked.append(forked)
        with contextlib.suppress(OSError):  # the caller has closed its end
            forked.link.send(f"{PID}{pid}".encode())


def _require_one_thread() -> None:
    if len(tuple(Path("/proc/self/task").iterdir())) > 1:
        raise ThreadedServerError(
            "an installed package starts threads when it is imported, so the step server cannot fork; each step of a "
            "preparation imports everything itself, which takes it some seconds more"
        )


def _wait_for(fds: Sequence[int]) -> set[int]:
    """Waits until some of the descriptors are readable, and returns these."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll()}


def _signal_for(link: socket.socket) -> signal.Signals:
    """Reads a message of a link, and returns the signal for its process."""
    try:
        told = link.recv(16)
    except OSError:
        told = b""
    return {HALT: signal.SIGSTOP, CONTINUE: signal.SIGCONT}.get(told, signal.SIGKILL)


def _tell_end(forked: _Forked) -> None:
    _, status = os.waitpid(forked.pid, 0)
    with contextlib.suppress(OSError):  # the caller has closed its end
        forked.link.send(str(os.waitstatus_to_exitcode(status)).encode())
    _close(forked)


def _close(forked: _Forked) -> None:
    os.close(forked.pid_fd)
    forked.link.close()


def _become(order: StepOrder, log_fd: int, server_pid: int) -> None:
    """Sets up the forked process: its log, limits and folder. The link stays open."""
    for fd in (1, 2):
        os.dup2(log_fd, fd)
    os.close(log_fd)
    die_with_parent(server_pid)
    limit(cpu_s=order.cpu_s, address_space_nbytes=order.address_space_nbytes, memory_nbytes=order.memory_nbytes)
    os.chdir(order.home)
    os.environ["HOME"] = order.home


if __name__ == "__main__":
    main(sys.argv[1:])
