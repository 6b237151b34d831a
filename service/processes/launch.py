"""Start of a detached supervisor, as `windlass up --detach` does it."""

import os
import subprocess
import sys
import time
from pathlib import Path

from windlass.service.cluster.box import membership_of
from windlass.service.installation import DispatcherLock, Serving, Settings, find_serving, open_client, prepare_home
from windlass.service.validation import ERROR_PREFIX, ReportedError

_UP_TIMEOUT_S = 240.0


class StartError(ReportedError):
    """The service did not start."""


def start_detached(settings: Settings) -> Serving:
    """Starts a supervisor without a terminal. Returns once the API answers, or a box can run jobs.

    Raises StartError.
    """
    prepare_home(settings.home)
    log_path = settings.home / "logs" / "supervisor.log"
    with log_path.open("ab") as log:
        offset = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "windlass.service", "supervisor"],
            env={**os.environ, "WINDLASS_HOME": str(settings.home)},
            cwd=settings.home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _UP_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartError(_last_error(log_path, offset))
        serving = find_serving(settings.home)
        if serving is not None and serving.process.pid == process.pid and _is_healthy(settings):
            return serving
        time.sleep(0.1)
    process.terminate()
    process.wait()
    raise StartError(f"the service was not ready within {_UP_TIMEOUT_S:g} s; see {log_path.parent}")


def _is_healthy(settings: Settings) -> bool:
    if membership_of(settings.home) is not None:  # a box has no API
        return _is_dispatching(settings)
    with open_client(settings) as client:
        return client.is_healthy()


def _is_dispatching(settings: Settings) -> bool:
    """Returns whether the home's dispatcher holds its lock, which it takes once it is connected to Ray."""
    lock = DispatcherLock(settings.home)
    try:
        return not lock.try_acquire()
    finally:
        lock.release()


def _last_error(log_path: Path, offset: int) -> str:
    with log_path.open("rb") as log:
        log.seek(offset)
        lines = log.read().decode(errors="replace").splitlines()
    errors = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    return errors[-1] if errors else f"the supervisor ended at once; see {log_path}"
