"""Fault injection into the real product: a signal to a job's process at a moment of a step, and short timeouts.

Python imports a module of this name when it starts: a test puts this folder on its processes' import path. It patches
modules of the product when they are imported.
"""

import json
import os
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FAULT_FILE = "fault.json"  # in the job's folder; `test_ray_hangs.py` writes it


def _change_runner(deploy: ModuleType) -> None:
    """Makes a job's runner write its pid to a file, and send the signal at the message of the fault."""
    begin, post = deploy.begin_attempt, deploy.Runner._post

    def runner_begins(job_dir: Path, attempt: int) -> int:
        _leave_pid(job_dir, "runner")
        return int(begin(job_dir, attempt))

    def runner_gets(self: Any, messages: Sequence[Any]) -> None:
        file = Path(self.spec.job_dir, FAULT_FILE)
        if file.exists() and any(_is_meant(json.loads(file.read_text()), message) for message in messages):
            fault = json.loads(file.read_text())
            pid = int(Path(self.spec.job_dir, f"{fault['victim']}.pid").read_text())
            file.unlink()  # the test waits for this: from here on the signal is certain to be sent
            os.kill(pid, fault["signal"])
        post(self, messages)

    deploy.begin_attempt = runner_begins
    deploy.Runner._post = runner_gets


def _change_workers(ray_box: ModuleType) -> None:
    """Makes each worker of a job write its pid to a file."""
    start = ray_box.start_actor

    def worker_starts(name: str, context: Any, *arguments: Any, **options: Any) -> Any:
        _leave_pid(Path(context.spec.job_dir), name)
        return start(name, context, *arguments, **options)

    # A module function is patched, because Ray has already copied the methods of the actor's class.
    ray_box.start_actor = worker_starts


def _leave_pid(job_dir: Path, name: str) -> None:
    (job_dir / f"{name}.pid").write_text(str(os.getpid()))


def _is_meant(fault: dict[str, Any], message: Any) -> bool:
    """Returns whether a message, or one that it carries, is that of the fault."""
    carried = (*getattr(message, "computed", ()), *getattr(message, "grads", ()))
    return any(
        (type(each).__name__, each.step) == (fault["message"], fault["step"])
        and fault["phase"] in (None, getattr(each, "phase", None))
        for each in (message, *carried)
    )


def _shorten_deadlines(job_specs: ModuleType) -> None:
    job_specs._DEADLINE_S = float(os.environ["TEST_DEADLINE_S"])


def _shorten_silence(dispatcher: ModuleType) -> None:
    dispatcher._SILENT_S = float(os.environ["TEST_DEADLINE_S"])


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "windlass.actors.runtime.ray_runner": _change_runner,
    "windlass.actors.runtime.ray_box": _change_workers,
    "windlass.service.jobs.spec_builder": _shorten_deadlines,
    "windlass.service.dispatcher.dispatcher": _shorten_silence,
}


runpy.run_path(str(Path(__file__).parents[2] / "support/changed_imports.py"))["change_when_imported"](_CHANGES)
