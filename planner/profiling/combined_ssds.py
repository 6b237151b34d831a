"""Measures the combined rate of several SSDs that are all busy.

It is below the sum of their rates if they share a controller, a link, or the cores that compute checksums. Each SSD has
a process of its own, as in a job.

`python -m windlass.planner.profiling.combined_ssds PATH` is one such process. It prints that it is ready, starts when
it reads a line, and prints bytes per second.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from windlass.actors.job import calibration_of, measuring, scratch
from windlass.storage.memory import explain_process_end
from windlass.storage.ssd import Volume, mixed_bytes_per_s

_SECONDS = 1.0  # of a measurement
_DEADLINE_S = 120.0  # of one SSD's process; a slow disk needs long to write the region for the first time
_READY = "ready"


def bytes_per_s_together(paths: Sequence[Path]) -> float:
    """Returns the combined rate of calibrated SSDs, with reads and writes mixed like an optimizer's.

    Raises:
        OSError, RuntimeError: an SSD failed or took too long.
    """
    with ExitStack() as stack:
        running = []
        for path in paths:
            command = [sys.executable, "-m", "windlass.planner.profiling.combined_ssds", str(path)]
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
            stack.callback(process.kill)
            running.append(process)
        for path, process in zip(paths, running, strict=True):
            assert process.stdout is not None
            if process.stdout.readline().strip() != _READY:
                raise _failed(path, process)
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return sum(_result(path, process) for path, process in zip(paths, running, strict=True))


def _result(path: Path, process: subprocess.Popen[str]) -> float:
    try:
        out, _ = process.communicate(timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{path} was not measured within {_DEADLINE_S:g} s") from None
    if process.returncode != 0:
        raise _failed(path, process)
    return float(out)


def _failed(path: Path, process: subprocess.Popen[str]) -> RuntimeError:
    _, errors = process.communicate(timeout=_DEADLINE_S)
    return RuntimeError(f"{path}, beside others: {explain_process_end(process.returncode, errors)}")


def _wait_for_all() -> None:
    print(_READY, flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the process that started this measurement has ended")


def main() -> None:
    """Measures one SSD."""
    volume = Volume.open(sys.argv[1])
    try:
        io = calibration_of(volume).io
        with measuring(volume), scratch(volume) as (offset, nbytes):
            print(mixed_bytes_per_s(volume.device, offset, nbytes, io, _wait_for_all, seconds=_SECONDS))
    finally:
        volume.close()


if __name__ == "__main__":
    main()
