"""The supervisor: it keeps a home's processes running as its children.

They are the API and the dispatcher. A head also has the server that boxes call. A box that has joined a head has its
agent instead of an API.

The Ray daemon and the jobs are not its children, so jobs continue when the service ends.
"""

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from windlass.service.auth import migrate_database, prepare_database
from windlass.service.cluster.authority import Authority, check_cluster_host
from windlass.service.cluster.box import membership_of
from windlass.service.installation import (
    HomeLock,
    Settings,
    find_gpus,
    is_loopback,
    num_cores,
    prepare_home,
    rotate_logs,
    telling_of_disk,
)
from windlass.service.machine import RayCluster
from windlass.service.validation import ReportedError

_LOG = logging.getLogger(__name__)

# Delays before a child that died is restarted. After a run of `_STEADY_S`, the delays begin with the first one again.
_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S = 60.0
_GRACE_S = 8.0
_ROTATE_EVERY_S = 60.0


class PortInUseError(ReportedError):
    """Another program listens on the API's port."""


class Child:
    """A process that is restarted whenever it ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log_path: Path,
        cwd: Path,
        fds: tuple[int, ...],
    ) -> None:
        self.name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._log_path = log_path
        self._cwd = cwd
        self._fds = fds
        self._process: subprocess.Popen[bytes] | None = None
        self._num_failures = 0
        self._started_at = 0.0
        self._start_at = 0.0  # monotonic time of its next start

    def tend(self, now: float) -> None:
        """Starts the process if it does not run and its delay is over."""
        if self._process is None:
            if now >= self._start_at:
                self._start(now)
        elif (code := self._process.poll()) is not None:
            self._process = None
            if now - self._started_at >= _STEADY_S:
                self._num_failures = 0
            delay_s = self._put_off(now)
            _LOG.warning("%s ended with code %d; next start in %g s; see %s", self.name, code, delay_s, self._log_path)

    def signal_end(self) -> None:
        """Requests the process to end."""
        if self._process is not None:
            self._process.terminate()

    def finish(self, deadline: float) -> None:
        """Waits until the process has ended; kills it at the deadline."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self, now: float) -> None:
        self._started_at = now
        try:
            self._process = self._open()
        except OSError as error:  # a full disk or too little memory, which may pass
            _LOG.warning("%s could not be started (%s); next try in %g s", self.name, error, self._put_off(now))

    def _open(self) -> "subprocess.Popen[bytes]":
        with self._log_path.open("ab") as log:
            # A session of its own, because Ctrl-C in a terminal must reach only the supervisor, which ends its children
            # in order.
            return subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._cwd,
                pass_fds=self._fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _put_off(self, now: float) -> float:
        """Delays the next start, each time longer. Returns the delay in seconds."""
        delay_s = _BACKOFF_S[min(self._num_failures, len(_BACKOFF_S) - 1)]
        self._num_failures += 1
        self._start_at = now + delay_s
        return delay_s


class Supervisor:
    """Serves a home until it is told to end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._membership = membership_of(settings.home)
        self._ending = False

    @property
    def _address(self) -> str:
        """The address that serves users: the API's, or that of the head."""
        return self._settings.base_url if self._membership is None else self._membership.head

    def run(self) -> None:
        """Starts all processes, keeps them running, and returns after SIGTERM, SIGINT or SIGHUP.

        Raises HomeError, AlreadyUpError, PortInUseError, UnprotectedError, DatabaseUnavailableError or RayStartError,
        with no process left.
        """
        settings = self._settings
        with telling_of_disk(settings.home):
            prepare_home(settings.home)
            lock = HomeLock(settings.home)
            lock.acquire(self._address)
        try:
            with telling_of_disk(settings.home), ExitStack() as stack:
                listeners = self._open_listeners(stack)
                stack.enter_context(self._ended_by_signals())
                settings.make_dirs()
                if self._membership is None:
                    prepare_database(settings)
                    _warn_of_clear_text(settings)
                else:
                    migrate_database(settings)  # it serves nobody, so it needs no key
                if settings.ray_address is None:
                    start_ray(settings)
                self._serve(listeners)
        finally:
            lock.release()

    def _open_listeners(self, stack: ExitStack) -> dict[str, socket.socket]:
        """Opens the sockets of this home's servers, by role. A box of another head has none."""
        settings = self._settings
        if self._membership is not None:
            return {}
        listeners = {"api": stack.enter_context(listening(settings.host, settings.port))}
        if settings.cluster_host is not None:
            check_cluster_host(settings.cluster_host)
            Authority.of(settings.home)  # made now, so that what is wrong with it is told at once
            opened = listening(settings.cluster_host, settings.cluster_port, setting="cluster_port")
            listeners["cluster"] = stack.enter_context(opened)
        return listeners

    def _serve(self, listeners: Mapping[str, socket.socket]) -> None:
        children = [
            self._child(role, f"--listener={listener.fileno()}", fds=(listener.fileno(),))
            for role, listener in listeners.items()
        ]
        children.append(self._child("dispatcher"))
        if self._membership is None:
            _LOG.info("serving %s at %s", self._settings.home, self._address)
        else:
            children.append(self._child("agent"))
            _LOG.info("working as box %s for the head at %s", self._membership.name, self._address)
        if "cluster" in listeners:
            _LOG.info("boxes reach this head at %s port %d", self._settings.cluster_host, self._settings.cluster_port)
        rotate_at = 0.0
        try:
            while not self._ending:
                now = time.monotonic()
                for child in children:
                    child.tend(now)
                if now >= rotate_at:
                    rotate_at = now + _ROTATE_EVERY_S
                    rotate_logs(self._settings.home / "logs", limit_nbytes=self._settings.log_mib * 1024**2)
                time.sleep(0.1)
        finally:
            _LOG.info("ending")
            for child in children:
                child.signal_end()
            deadline = time.monotonic() + _GRACE_S
            for child in children:
                child.finish(deadline)

    def _child(self, role: str, *arguments: str, fds: tuple[int, ...] = ()) -> Child:
        ray_environment = RayCluster(self._settings.home).environment if self._settings.ray_address is None else {}
        return Child(
            role,
            [sys.executable, "-m", "windlass.service", role, f"--parent-pid={os.getpid()}", *arguments],
            environment={**os.environ, **ray_environment, "WINDLASS_HOME": str(self._settings.home)},
            log_path=self._settings.home / "logs" / f"{role}.log",
            cwd=self._settings.home,
            fds=fds,
        )

    @contextmanager
    def _ended_by_signals(self) -> Iterator[None]:
        def end(_signum: int, _frame: FrameType | None) -> None:
            self._ending = True

        previous = {signum: signal.signal(signum, end) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)


def _warn_of_clear_text(settings: Settings) -> None:
    if not (is_loopback(settings.host) or settings.tls_certificate or settings.trusted_proxies):
        _LOG.warning("host is %s without TLS: whoever listens on the network reads the API keys", settings.host)


def start_ray(settings: Settings) -> None:
    """Starts the home's Ray daemon, or adopts the running one. Raises RayStartError if neither works."""
    started = RayCluster(settings.home).ensure_running(
        num_cpus=num_cores(), num_gpus=len(find_gpus()), cpu_ranks=settings.cpu_ranks
    )
    _LOG.info("Ray was %s", "started" if started else "running and is adopted, with the jobs it runs")


@contextmanager
def listening(host: str, port: int, *, setting: str = "port") -> Iterator[socket.socket]:
    """Opens the socket of the API, or of another server, whose setting is named then.

    The supervisor holds it, so that no other program can take the port while the API restarts.

    Raises PortInUseError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # Otherwise the port is unusable for a minute after the last service's connections were closed.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise PortInUseError(
                    f"{host} is no address of this machine; set {setting.removesuffix('port')}host to one that it has"
                ) from error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = "is used by another program" if error.errno == errno.EADDRINUSE else "may not be used by you"
            option = f"--{setting.replace('_', '-')}"
            raise PortInUseError(
                f"port {port} of {host} {why}; choose another with `windlass up {option}` or WINDLASS_{setting.upper()}"
            ) from error
        yield listener
