"""The service's own Ray daemon. It is started apart from every process of the service, so that jobs outlive them.

It listens on loopback only and requires a token that only its owner can read. It is ended by the pids recorded at its
start, because `ray stop` would also end other users' clusters.
"""

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from windlass.actors.lifecycle import lower_session
from windlass.service.installation import ProcessId, end_processes, find_process, with_descendants
from windlass.service.validation import ReportedError
from windlass.storage.files import locked, write_atomically

_LOG = logging.getLogger(__name__)

NAMESPACE = "windlass"
# One job at a time holds a device of the machine. Ray counts devices, GPUs or the CPU, as this resource.
DEVICE_RESOURCE = "device"
TOKEN_FILE = "ray-token"  # in the home

_DASHBOARD = "/dashboard/dashboard.py"  # the program of Ray's dashboard process
_CORE_NAMES = ("gcs_server", "raylet")
_START_TIMEOUT_S = 120.0
# Ray's minimum is 75 MiB. Large data never passes through its object store.
_OBJECT_STORE_NBYTES = 80 * 1024**2
_NUM_REMOVALS = 10
_REMOVAL_PAUSE_S = 0.2


class RayStartError(ReportedError):
    """Ray could not be started."""


class _StartEndedError(RayStartError):
    """`ray start` ended with an error of its own, or its processes ended at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The record of the daemon in the home, written before it starts and again after its start."""

    address: str
    temp_dir: str
    core: tuple[ProcessId, ...]  # GCS and raylet, both essential; empty while they start
    helpers: tuple[ProcessId, ...]  # Ray's other processes, which jobs do not need

    @property
    def is_running(self) -> bool:
        return len(self.core) > 0 and all(process.is_alive for process in self.core)


class RayCluster:
    """The Ray daemon that belongs to a home directory."""

    def __init__(self, home: Path) -> None:
        self._record_path = home / "ray.json"
        self._lock_path = home / "ray.lock"
        self._token_path = home / TOKEN_FILE
        self._log_path = home / "logs" / "ray-start.log"

    @property
    def is_running(self) -> bool:
        """Returns whether the recorded GCS and raylet live."""
        record = self._read_record()
        return record is not None and record.is_running

    @property
    def address(self) -> str:
        """The host and port for drivers, of the daemon that runs or ran last."""
        record = self._read_record()
        if record is None:
            raise RayStartError("no Ray daemon has been started in this home; start one with `windlass up`")
        return record.address

    @property
    def pids(self) -> tuple[int, ...]:
        """The pids of the daemon's recorded processes that live."""
        record = self._read_record()
        if record is None:
            return ()
        return tuple(process.pid for process in (*record.core, *record.helpers) if process.is_alive)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the daemon and its drivers must have before they import Ray."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token_path),
            # The monitor counts shared memory, which holds our arenas, and would kill actors.
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray gives its workers nice 15, so any other program on the machine would starve a training job.
            "RAY_worker_niceness": "0",
            "RAY_preload_python_modules": "windlass.actors.runtime.absent_packages",
            # If it is off, Ray uses the loopback address and listens only there. Otherwise Ray replaces 127.0.0.1 by
            # the machine's outer address, listens on every interface, and fails when that address changes.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }

    def ensure_running(self, *, num_cpus: int, num_gpus: int, cpu_ranks: int = 1) -> bool:
        """Starts the daemon, or adopts the recorded one if it lives. Returns True if it was started.

        `cpu_ranks`: devices that the CPU counts as, if there are no GPUs.
        """
        with self._locked():
            if self.is_running:
                return False
            # After a crash, the remaining processes of an earlier daemon are useless.
            self._end_recorded()
            sizes = {"num_cpus": num_cpus, "num_gpus": num_gpus, "num_devices": num_gpus or cpu_ranks}
            try:
                self._start(**sizes)
            except _StartEndedError as error:
                # Ray waits at most 30 s for its own processes, which is too short on a machine under load. Another
                # program may also have taken the port meanwhile.
                _LOG.warning("%s; it is started once more", error)
                self._start(**sizes)
            return True

    def connect(self) -> None:
        """Makes this process a Ray driver in our namespace. The daemon must be running."""
        missing = {key for key, value in self.environment.items() if os.environ.get(key) != value}
        if "ray" in sys.modules and missing:
            # Ray would look for the daemon on the machine's outer address and wait forever.
            raise RayStartError(f"ray was imported before its environment was set: {', '.join(sorted(missing))}")
        os.environ.update(self.environment)
        import ray  # imported late, because Ray reads its environment at the import

        ray.init(address=self.address, namespace=NAMESPACE, log_to_driver=False, logging_level="WARNING")

    def stop(self) -> list[int]:
        """Ends the recorded processes and all their descendants, and nothing else. Returns the pids."""
        if not self._lock_path.exists():
            return []  # no daemon was ever started here
        with self._locked():
            return self._end_recorded()

    def _start(self, *, num_cpus: int, num_gpus: int, num_devices: int) -> None:
        self._write_token()
        # Unix socket paths have at most 107 characters and Ray adds about 70, so the home's path may be too long. Ray
        # makes its own folder writable for all, so it lies in a folder that only the owner may enter.
        temp_dir = Path(tempfile.mkdtemp(prefix="windlass-ray-", dir="/tmp"))
        address = f"127.0.0.1:{_free_port()}"
        self._write_record(_Record(address=address, temp_dir=str(temp_dir), core=(), helpers=()))
        sizes = {"num_cpus": num_cpus, "num_gpus": num_gpus, "num_devices": num_devices}
        command = _start_command(address, temp_dir / "ray", **sizes)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            try:
                result = subprocess.run(
                    command,
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    timeout=_START_TIMEOUT_S,
                    check=False,
                )
                has_ended, problem = True, f"exit code {result.returncode}" if result.returncode != 0 else None
            except subprocess.TimeoutExpired:
                has_ended, problem = False, f"it did not finish within {_START_TIMEOUT_S:g} s"
        core, helpers = _daemon_processes(temp_dir)
        # `--include-dashboard=false` leaves out its pages, not its process, and jobs need neither. Ray's other helpers
        # are children of the raylet, which ends with them.
        dashboards = [process for process in helpers if _is_dashboard(process)]
        end_processes(dashboards, grace_s=3.0)
        helpers = tuple(process for process in helpers if process not in dashboards)
        if problem is None and len(core) != len(_CORE_NAMES):
            problem = "GCS or raylet ended at once"
        if problem is not None:
            self._end_recorded()
            failure = _StartEndedError if has_ended else RayStartError
            raise failure(f"`ray start` failed ({problem}); see {self._log_path}")
        lower_session(core[0].pid)  # of all daemons, and of the jobs' processes, which are their children
        self._write_record(_Record(address=address, temp_dir=str(temp_dir), core=core, helpers=helpers))

    def _end_recorded(self) -> list[int]:
        record = self._read_record()
        if record is None:
            return []
        ended = with_descendants((*record.core, *record.helpers))
        # In reverse order of their start: a raylet deregisters from the GCS, and both hang if they are ended at once.
        for process in reversed(record.core):
            end_processes([process], grace_s=3.0)
        end_processes(ended, grace_s=3.0)
        # A start that was interrupted recorded no pids and may still run. Its processes are found by their unique
        # folder's name.
        while more := with_descendants(sum(_daemon_processes(Path(record.temp_dir)), ())):
            end_processes(more, grace_s=3.0)
            ended += more
        _remove_folder(Path(record.temp_dir))
        self._record_path.unlink(missing_ok=True)
        return [process.pid for process in ended]

    def _write_token(self) -> None:
        if self._token_path.exists():
            return
        write_atomically(self._token_path, secrets.token_hex(32), mode=0o600)

    def _read_record(self) -> _Record | None:
        try:
            fields = json.loads(self._record_path.read_text())
            core, helpers = (tuple(ProcessId(**each) for each in fields[name]) for name in ("core", "helpers"))
            return _Record(address=fields["address"], temp_dir=fields["temp_dir"], core=core, helpers=helpers)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None  # none was started, or a power loss took the record and the daemon

    def _write_record(self, record: _Record) -> None:
        write_atomically(self._record_path, json.dumps(asdict(record), indent=1))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets only one process at a time start or stop the daemon."""
        with locked(self._lock_path):
            yield


def _start_command(address: str, temp_dir: Path, *, num_cpus: int, num_gpus: int, num_devices: int) -> list[str]:
    host, port = address.rsplit(":", 1)
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head"),
        f"--node-ip-address={host}",
        f"--port={port}",
        # 0: any free port, because another cluster may use ports of the default range.
        *("--min-worker-port=0", "--max-worker-port=0"),
        f"--temp-dir={temp_dir}",
        f"--num-cpus={num_cpus}",
        f"--num-gpus={num_gpus}",
        f"--resources={json.dumps({DEVICE_RESOURCE: num_devices})}",
        f"--object-store-memory={_OBJECT_STORE_NBYTES}",
        *("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor", "--disable-usage-stats"),
    ]
    if importlib.util.find_spec("grpc") is not None:
        # If gRPC is installed, Ray also opens a client server, by default on a fixed port.
        command.append(f"--ray-client-server-port={_free_port()}")
    return command


def _is_dashboard(process: ProcessId) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(word.endswith(_DASHBOARD) for word in psutil.Process(process.pid).cmdline())
    return False


def _remove_folder(folder: Path) -> None:
    """Removes a folder, with retries, because workers of a killed raylet still write there while they end."""
    for _ in range(_NUM_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_REMOVAL_PAUSE_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _daemon_processes(temp_dir: Path) -> tuple[tuple[ProcessId, ...], tuple[ProcessId, ...]]:
    """Finds our processes that have a path below `temp_dir` in their command line.

    `ray start` does not report their pids.
    """
    core: list[ProcessId] = []
    helpers: list[ProcessId] = []
    for process in psutil.process_iter(["name", "cmdline", "uids"]):
        cmdline, uids = process.info["cmdline"], process.info["uids"]
        named = any(f"{temp_dir}/" in argument for argument in cmdline or ())
        if named and uids is not None and uids.real == os.getuid() and (found := find_process(process.pid)) is not None:
            (core if process.info["name"] in _CORE_NAMES else helpers).append(found)
    return tuple(core), tuple(helpers)
