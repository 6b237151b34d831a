"""Signals to a process of a job at a moment of a step, and short deadlines, in the processes of the real product.

Python imports a module of this name when it starts: a test puts this folder on its processes' import path. What is
changed is changed as the product's modules are imported.
"""

import json
import os
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FAULT_FILE = "fault.json"  # in the job's folder; `test_ray_hangs.py` writes it


def _change_actors(deploy: ModuleType) -> None:
    """Each process of a job leaves its pid; the runner signals to one of them when it gets the message it is to."""
    begin, build, post = deploy.begin_attempt, deploy.build_actor, deploy.Runner._post

    def runner_begins(job_dir: Path, attempt: int) -> int:
        _leave_pid(job_dir, "runner")
        return int(begin(job_dir, attempt))

    def worker_builds(name: str, context: Any, send: Any, *, uses_gpu: bool) -> Any:
        _leave_pid(Path(context.spec.job_dir), name)
        return build(name, context, send, uses_gpu=uses_gpu)

    def runner_gets(self: Any, messages: Sequence[Any]) -> None:
        file = Path(self.spec.job_dir, FAULT_FILE)
        if file.exists() and any(_is_meant(json.loads(file.read_text()), message) for message in messages):
            fault = json.loads(file.read_text())
            pid = int(Path(self.spec.job_dir, f"{fault['victim']}.pid").read_text())
            file.unlink()  # the test looks for it: from here on the signal is sure to be sent
            os.kill(pid, fault["signal"])
        post(self, messages)

    deploy.begin_attempt = runner_begins
    # A function of the module: the methods of the class that Ray was given are copies by now.
    deploy.build_actor = worker_builds
    deploy.Runner._post = runner_gets


def _leave_pid(job_dir: Path, name: str) -> None:
    (job_dir / f"{name}.pid").write_text(str(os.getpid()))


def _is_meant(fault: dict[str, Any], message: Any) -> bool:
    return (type(message).__name__, message.step) == (fault["message"], fault["step"]) and fault["phase"] in (
        None,
        getattr(message, "phase", None),
    )


def _shorten_deadlines(job_specs: ModuleType) -> None:
    job_specs._DEADLINE_S = float(os.environ["TEST_DEADLINE_S"])


def _shorten_silence(dispatcher: ModuleType) -> None:
    dispatcher._SILENT_S = float(os.environ["TEST_DEADLINE_S"])


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "windlass.actors.runtime.ray_runner": _change_actors,
    "windlass.service.jobs.spec_builder": _shorten_deadlines,
    "windlass.service.dispatcher.dispatcher": _shorten_silence,
}


runpy.run_path(str(Path(__file__).parents[2] / "support/changed_imports.py"))["change_when_imported"](_CHANGES)
