"""A limited process that runs one step after the other and keeps its imports, and what else its module keeps."""

import logging
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import psutil

from windlass.service.preparation.sandbox.process import (
    PASSED_ON,
    LimitedCommand,
    LimitedProcess,
    start_limited,
    start_server,
)
from windlass.service.preparation.sandbox.warm_server import DONE, WarmOrder

_LOG = logging.getLogger(__name__)

_SERVER = "windlass.service.preparation.sandbox.warm_server"
_IDLE_S = 600.0  # seconds without a step after which the process ends, because jobs need its memory more
# Share of the memory that a step may take. If the process holds more before the step, it is replaced.
_MOST_HELD_SHARE = 0.5


class WarmProcess:
    """Runs the steps of one module in one process, which begins with the first step.

    Each step has its own limits of CPU time and memory. A step that comes while another one runs gets a process of its
    own. The process is replaced after a step that failed or was killed, and if it has grown. It ends after some idle
    minutes, at `close`, and with this process. Methods may be called by any thread.
    """

    def __init__(self, module: str, log_path: Path, *, idle_s: float = _IDLE_S) -> None:
        """`module`: see `warm_server`. `log_path`: for the output of its imports."""
        self._module, self._log_path, self._idle_s = module, log_path, idle_s
        self._lock = threading.Lock()
        # The kernel ends the process with the thread that has started it, and threads of requests are short-lived.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="warm-process")
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._is_busy = False
        self._idle_timer: threading.Timer | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process, or None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self, limited: LimitedCommand, log: IO[bytes]) -> LimitedProcess:
        """Runs a step in the process. Steps of other modules, or with other rights, get processes of their own."""
        is_ours = limited.command[:3] == (sys.executable, "-m", self._module)
        if not is_ours or limited.passed_on != PASSED_ON or limited.sees_gpus:
            return self._start_apart(limited, log)
        with self._lock:
            if self._is_busy:
                return self._start_apart(limited, log)
            try:
                return self._begin(limited, log)
            except OSError as error:
                _LOG.warning("there is no warm process (%s), see %s", error, self._log_path)
                self._end()
        return self._start_apart(limited, log)

    def _start_apart(self, limited: LimitedCommand, log: IO[bytes]) -> LimitedProcess:
        return self._starter.submit(start_limited, limited, log).result()

    def close(self) -> None:
        """Ends the process and the step that it runs."""
        with self._lock:
            self._end()
        self._starter.shutdown()

    def renew(self) -> None:
        """Ends the process unless it runs a step, so that the next step has a fresh one."""
        with self._lock:
            if not self._is_busy:
                self._end()

    def release(self, *, keeps: bool) -> None:
        """Takes the end of a step. `keeps`: the process goes on. Only the step's handle calls this."""
        with self._lock:
            self._is_busy = False
            if not keeps:
                self._end()
                return
            self._idle_timer = threading.Timer(self._idle_s, self._end_if_idle)
            self._idle_timer.daemon = True
            self._idle_timer.start()

    # --- private: the caller holds the lock ---------------------------------------------------------------------------

    def _begin(self, limited: LimitedCommand, log: IO[bytes]) -> LimitedProcess:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._process is None or self._process.poll() is not None or self._holds_too_much(limited.memory_nbytes):
            self._end()
            self._starter.submit(self._launch).result()
        assert self._process is not None, "it was launched"
        assert self._orders is not None, "it was launched"
        _set_limits(self._process.pid, limited)
        order = WarmOrder(arguments=limited.command[3:], home=str(limited.home))
        socket.send_fds(self._orders, [order.to_message()], [log.fileno()])
        self._is_busy = True
        return _Step(self, self._process, self._orders)

    def _holds_too_much(self, memory_nbytes: int | None) -> bool:
        assert self._process is not None, "it runs"
        try:
            held_nbytes = psutil.Process(self._process.pid).memory_info().rss
        except psutil.Error:  # it has just ended
            return True
        return memory_nbytes is not None and held_nbytes > _MOST_HELD_SHARE * memory_nbytes

    def _launch(self) -> None:
        self._log_path.parent.mkdir(mode=0o700, exist_ok=True)
        self._process, self._orders = start_server((_SERVER, self._module), self._log_path)

    def _end(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._orders is not None and not self._is_busy:  # else the step's handle reads from it
            self._orders.close()
        self._orders = None

    # ------------------------------------------------------------------------------------------------------------------

    def _end_if_idle(self) -> None:
        with self._lock:
            if not self._is_busy and threading.current_thread() is self._idle_timer:
                self._end()


class _Step:
    """A step that the process runs."""

    def __init__(self, owner: WarmProcess, process: "subprocess.Popen[bytes]", orders: socket.socket) -> None:
        self._owner, self._process, self._orders = owner, process, orders
        self._code: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def halt(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def proceed(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def poll(self) -> int | None:
        if self._code is None:
            try:
                answer = self._orders.recv(16)
            except BlockingIOError:
                return None
            except OSError:
                answer = b""
            self._finish(answer)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            self._process.kill()

    def wait(self) -> int:
        while (code := self.poll()) is None:
            told = select.poll()
            told.register(self._orders, select.POLLIN)
            told.poll()
        return code

    def _finish(self, answer: bytes) -> None:
        is_done = answer == DONE
        self._code = 0 if is_done else self._process.wait()
        if not is_done:
            self._orders.close()
        self._owner.release(keeps=is_done)


def _set_limits(pid: int, limited: LimitedCommand) -> None:
    """Sets the limits of a step. Those of CPU time add to what the process has used. Raises OSError."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error as error:
        raise ProcessLookupError(f"process {pid} has ended") from error
    _limit(pid, resource.RLIMIT_CPU, int(times.user + times.system) + 1 + limited.cpu_s)
    _limit(pid, resource.RLIMIT_AS, limited.address_space_nbytes)
    _limit(pid, resource.RLIMIT_DATA, limited.memory_nbytes)


def _limit(pid: int, which: int, most: int | None) -> None:
    """Sets a soft limit, which the next step may raise again. None: only the hard limit holds."""
    _, hard = resource.prlimit(pid, which)
    soft = hard if most is None else most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.prlimit(pid, which, (soft, hard))
