"""Limited processes without secrets, started or forked. They end with the process that started them."""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from windlass.actors.lifecycle import WAIT_POLICY, allocator_settings
from windlass.service.installation import num_cores
from windlass.service.preparation.sandbox.fork_server import CANNOT_FORK, CONTINUE, HALT, PID, StepOrder
from windlass.storage.memory import describe_process_end

_LOG = logging.getLogger(__name__)

# Environment variables that programs need for libraries and languages. All others might be secrets.
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")
# Seconds to wait for a killed process. It ends at once, but a server that was just started may still import.
_END_S = 60.0


class ServerEndedError(RuntimeError):
    """The server of a forked process has ended, and the process with it."""


class LimitedProcess(Protocol):
    """A process under limits that runs or ran."""

    @property
    def pid(self) -> int | None:
        """Its id; None while it is unknown."""

    def halt(self) -> None:
        """Stops it until `proceed`; does nothing if it has ended."""

    def proceed(self) -> None:
        """Continues it after `halt`."""

    def poll(self) -> int | None:
        """Returns its exit code, or None while it runs. Raises ServerEndedError."""

    def kill(self) -> None:
        """Requests its end."""

    def wait(self) -> int:
        """Waits for its end and returns its exit code. Raises ServerEndedError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedCommand:
    """A command and its limits."""

    command: tuple[str, ...]
    home: Path  # its working directory
    cpu_s: int
    address_space_nbytes: int
    memory_nbytes: int | None = None  # its own memory; None: only the address space limits it
    passed_on: tuple[str, ...] = PASSED_ON  # environment variables
    sees_gpus: bool = False  # then its address space is unlimited, because CUDA maps more than any limit


_FORK_SERVER = "windlass.service.preparation.sandbox.fork_server"
# The program that limits itself and then becomes a command.
_LIMITED_EXEC = "windlass.service.preparation.sandbox.limited_exec"

# CUDA maps more addresses than the limit allows, and most steps do not need it.
_NO_GPUS: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": ""}

# Otherwise tokenizers take all cores, while several steps and jobs run at once.
_TOKENIZER_THREADS: Mapping[str, str] = {"RAYON_NUM_THREADS": str(max(1, num_cores() // 4))}

Start = Callable[[LimitedCommand, IO[bytes]], LimitedProcess]  # the second argument: its output


def start_limited(limited: LimitedCommand, log: IO[bytes]) -> LimitedProcess:
    """Starts a new process."""
    home = limited.home
    limits = [f"--cpu-s={limited.cpu_s}"]
    gpus = _NO_GPUS
    if limited.sees_gpus:
        gpus = {name: os.environ[name] for name in _NO_GPUS if name in os.environ} | allocator_settings(os.environ)
    else:
        limits.append(f"--address-space-nbytes={limited.address_space_nbytes}")
        if limited.memory_nbytes is not None:
            limits.append(f"--memory-nbytes={limited.memory_nbytes}")
    return _Started(_start(limited.command, limited.passed_on, home=home, cwd=home, log=log, limits=limits, gpus=gpus))


def _start(
    command: Sequence[str],
    passed_on: Sequence[str],
    *,
    home: Path,
    cwd: Path,
    log: IO[bytes],
    limits: Sequence[str] = (),
    gpus: Mapping[str, str] = _NO_GPUS,
    stdin: int = subprocess.DEVNULL,
    more: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", _LIMITED_EXEC, f"--parent-pid={os.getpid()}", *limits, "--", *command],
        env={
            "HF_HUB_OFFLINE": "1",
            **{name: os.environ[name] for name in passed_on if name in os.environ},
            "HOME": str(home),
            **WAIT_POLICY,
            **_TOKENIZER_THREADS,
            **gpus,
            **(more or {}),
        },
        cwd=cwd,
        stdin=stdin,
        stdout=log,
        stderr=log,
    )


def start_server(
    module_and_arguments: Sequence[str], log_path: Path
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Starts a module that takes orders over the socket at its standard input. Returns the socket's other end, too.

    The process has no limits of its own yet. The kernel ends it with the thread that called this. Raises OSError.
    """
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    orders.setblocking(False)
    try:
        with theirs, log_path.open("ab") as log:
            # It has no home, and its working directory can contain no user's modules.
            process = _start(
                (sys.executable, "-m", *module_and_arguments),
                PASSED_ON,
                home=Path("/nonexistent"),
                cwd=Path("/"),
                log=log,
                stdin=theirs.fileno(),
                more={"OPENBLAS_NUM_THREADS": "1"},  # otherwise NumPy's import starts threads
            )
    except OSError:
        orders.close()
        raise
    return process, orders


class _Started:
    """A process that was started, not forked."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def halt(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def proceed(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        return self._process.wait()


class _Forked:
    """A process that a server has forked, or will fork after its imports."""

    def __init__(self, link: socket.socket, server: "subprocess.Popen[bytes]") -> None:
        self._link = link
        self._server = server
        self._code: int | None = None
        self._pid: int | None = None

    @property
    def pid(self) -> int | None:
        return self._pid

    def halt(self) -> None:
        self._send(HALT)

    def proceed(self) -> None:
        self._send(CONTINUE)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._link.send(message)

    def poll(self) -> int | None:
        while self._code is None:
            try:
                told = self._link.recv(16)
            except BlockingIOError:
                return None
            except OSError:
                told = b""
            if told.startswith(PID.encode()):
                self._pid = int(told[len(PID) :])
                continue
            self._link.close()
            if not told:
                code = self._server.poll()
                how = "has ended" if code is None else describe_process_end(code)
                raise ServerEndedError(f"the process that it was forked from, {self._server.pid}, {how}")
            self._code = int(told)
        return self._code

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._link.shutdown(socket.SHUT_WR)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            told = select.poll()
            told.register(self._link, select.POLLIN)
            if not told.poll(_END_S * 1000):
                self._server.kill()  # which ends the process too
        return code


class StepServer:
    """A process that has imported modules and forks for each step. If it has ended, it is started again."""

    def __init__(self, modules: Iterable[str], log_path: Path, *, also: Iterable[str] = ()) -> None:
        """`also`: further imports, of modules that the others import only on demand."""
        self._modules = frozenset(modules)
        self._imports = (*sorted(self._modules), *also)
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None

    def begin(self) -> None:
        """Starts the server if it does not run, and returns while it imports. Raises OSError.

        Does nothing if it has found that it cannot fork.
        """
        if self._process is not None and self._process.poll() in (None, CANNOT_FORK):
            return
        self.close()
        self._process, self._orders = start_server((_FORK_SERVER, *self._imports), self._log_path)

    def start(self, limited: LimitedCommand, log: IO[bytes]) -> LimitedProcess:
        """Forks a process if the command is one of the modules. Otherwise, or without a server, starts a new one."""
        if self._can_run(limited):
            try:
                return self._fork(limited, log)
            except OSError as error:
                _LOG.warning("there is no step server (%s), see %s", error, self._log_path)
        return start_limited(limited, log)

    def close(self) -> None:
        """Ends the server and all its forked processes."""
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _can_run(self, limited: LimitedCommand) -> bool:
        if self._process is not None and self._process.poll() == CANNOT_FORK:
            return False
        is_ours = limited.command[:2] == (sys.executable, "-m") and limited.command[2] in self._modules
        return is_ours and limited.passed_on == PASSED_ON and not limited.sees_gpus

    def _fork(self, limited: LimitedCommand, log: IO[bytes]) -> LimitedProcess:
        self.begin()
        assert self._orders is not None, "it has begun"
        assert self._process is not None, "it has begun"
        module, *arguments = limited.command[2:]
        order = StepOrder(
            module=module,
            arguments=arguments,
            home=str(limited.home),
            cpu_s=limited.cpu_s,
            address_space_nbytes=limited.address_space_nbytes,
            memory_nbytes=limited.memory_nbytes,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._orders, [order.to_message()], [log.fileno(), theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return _Forked(ours, self._process)
