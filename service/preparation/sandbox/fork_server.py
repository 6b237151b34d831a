"""Runs steps of preparations in processes that need not import anything.

`python -m windlass.service.preparation.sandbox.fork_server MODULES`: importing torch and transformers takes seconds.
This process does it once, and forks for each step. It reads no file of a stranger's and holds no secret. What does
read them is a forked process, with the limits of this one (see `limited_exec`) and those of its step.

Orders come over the socket that is its standard input: one JSON object each, with the step's log and an end of the
step's link. Over the link the process's id and then its exit code are told; HALT and CONTINUE, sent over it, stop the
process and let it go on. Once the other end is shut down or closed the step is killed. The forked process holds the
link too, so that it ends without a code only when both are gone.
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

from windlass.service.installation import die_with_parent
from windlass.service.preparation.sandbox.limited_exec import limit

_MOST_NBYTES = 1 << 16  # of an order
HALT, CONTINUE = b"halt", b"continue"  # what is sent over a link
PID = "pid "  # what the message begins with that tells it


class ThreadedServerError(RuntimeError):
    """An import has started threads: a process that is forked now could wait for ever for what they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """What a forked process is to do."""

    module: str  # which the server has imported; its `main` is called
    arguments: Sequence[str]
    home: str  # where it works
    cpu_s: int  # what it may compute
    address_space_nbytes: int  # and map
    memory_nbytes: int | None  # and take as memory of its own

    def to_message(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forked:
    pid: int
    pid_fd: int  # readable once it has ended
    link: socket.socket


def main(modules: Sequence[str]) -> None:
    """Serve until nobody can give orders any more; a forked process does its step instead."""
    orders = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # else every forked process copies what its first collection only looks at
    order = serve(orders)
    if order is not None:
        sys.argv = [order.module, *order.arguments]
        sys.modules[order.module].main()
        sys.stdout.flush()
        os._exit(0)  # with torch loaded Python's own end takes a second, and nothing is left to do


def serve(orders: socket.socket) -> StepOrder | None:
    """Returns in each forked process what that is to do, and None here, at the end."""
    server_pid = os.getpid()
    all_forked: list[_Forked] = []
    while True:
        ready = _wait_for([orders.fileno(), *(fd for each in all_forked for fd in (each.pid_fd, each.link.fileno()))])
        for each in tuple(all_forked):
            if each.pid_fd in ready:
                all_forked.remove(each)
                _tell_end(each)
            elif each.link.fileno() in ready:
                os.kill(each.pid, _signal_for(each.link))  # its own: nobody has waited for it yet
        if orders.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(orders, _MOST_NBYTES, 2)
        if not message:
            return None
        order, (log_fd, link_fd) = StepOrder(**json.loads(message)), fds
        if len(tuple(Path("/proc/self/task").iterdir())) > 1:
            raise ThreadedServerError("the imports of the step server have started threads, so it cannot fork")
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
        with contextlib.suppress(OSError):  # nobody wants to know any more
            forked.link.send(f"{PID}{pid}".encode())


def _wait_for(fds: Sequence[int]) -> set[int]:
    """Those of them that can be read."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll()}


def _signal_for(link: socket.socket) -> signal.Signals:
    """Read what was sent over a link: how its process is to go on, if at all."""
    try:
        told = link.recv(16)
    except OSError:
        told = b""
    return {HALT: signal.SIGSTOP, CONTINUE: signal.SIGCONT}.get(told, signal.SIGKILL)


def _tell_end(forked: _Forked) -> None:
    _, status = os.waitpid(forked.pid, 0)
    with contextlib.suppress(OSError):  # nobody wants to know any more
        forked.link.send(str(os.waitstatus_to_exitcode(status)).encode())
    _close(forked)


def _close(forked: _Forked) -> None:
    os.close(forked.pid_fd)
    forked.link.close()


def _become(order: StepOrder, log_fd: int, server_pid: int) -> None:
    """What a process that is started anew gets from its command line; the link stays open."""
    for fd in (1, 2):
        os.dup2(log_fd, fd)
    os.close(log_fd)
    die_with_parent(server_pid)
    limit(cpu_s=order.cpu_s, address_space_nbytes=order.address_space_nbytes, memory_nbytes=order.memory_nbytes)
    os.chdir(order.home)
    os.environ["HOME"] = order.home


if __name__ == "__main__":
    main(sys.argv[1:])
