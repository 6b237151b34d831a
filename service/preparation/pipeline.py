"""Runs the steps of a preparation, each in a limited process of its own.

Chat templates and data files come from users, so the processes that read them have little memory, little time and no
secrets.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from windlass.amounts import GIB
from windlass.service.preparation.sandbox import (
    LimitedCommand,
    LimitedProcess,
    ServerEndedError,
    Start,
    start_limited,
)
from windlass.service.preparation.steps import (
    CHECK_MODEL,
    DOWNLOAD_MODEL,
    PREPARE_DATA,
    LaterStep,
    PreparationOrder,
    PreparationStep,
    Results,
    steps_of,
)
from windlass.storage.memory import describe_process_end, last_line, reports_out_of_memory

_LOG = logging.getLogger(__name__)

_MEMORY_ADVICE = "Wait until other jobs and programs have ended, or add memory, and submit the job again"
_TIME_ADVICE = {PREPARE_DATA: "Try a smaller file", CHECK_MODEL: "Try a smaller model"}
_OTHER_ADVICE = "Submit the job again; the administrator finds its output in prepare/prepare.log of the job's folder"
_MOST_LOG_NBYTES = 4096  # bytes of a step's output that are searched for its last line
_LOOK_S = 1.0  # between two looks for other jobs while times are measured; a job computes some seconds after it starts
# Minimum memory grant of a step in bytes. Importing torch and transformers takes a third of it.
LEAST_MEMORY_NBYTES = 3 * 1024**3 // 2
# Minimum address space of a step in bytes. Importing torch alone maps several GiB.
_LEAST_ADDRESS_SPACE_NBYTES = 16 * 1024**3


class PreparationError(Exception):
    """A job's model or data cannot be trained with. Code, message and param become the job's error."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code, message, param)
        self.code, self.message, self.param = code, message, param

    def __str__(self) -> str:
        return self.message


class StepFailedError(PreparationError):
    """A step's process failed, so that nothing is known about the model or the data."""

    def __init__(self, code: str, cause: str, advice: str, log_path: Path, *, is_timeout: bool) -> None:
        """`cause`: how and why the process failed.

        `advice`: what the user can do. `log_path`: the output of the process. `is_timeout`: it took too long.
        """
        # The error omits `log_path`, because its reader may be on another machine.
        super().__init__(code, f"{cause}. {advice}")
        self.cause, self.advice, self.log_path, self.is_timeout = cause, advice, log_path, is_timeout

    @property
    def lacks_memory(self) -> bool:
        """True if the process got no more memory, or was killed for that."""
        return self.advice == _MEMORY_ADVICE


# Returns the memory in bytes that a step's process may take, or None if the step must wait.
Admit = Callable[[PreparationStep], int | None]


def half_of_the_machine(_step: PreparationStep) -> int:
    """Admits any step, with half of the machine's memory."""
    return max(LEAST_MEMORY_NBYTES, psutil.virtual_memory().total // 2)


class Preparation:
    """Runs steps one after the other without blocking, and ends with the result of each by name.

    A step may be made from the results of the earlier steps, or be left out because of them. `warnings` are for the
    job's owner, about processes that died and were replaced. The caller clears the list once it has passed them on.
    `admit` is called before a step begins, until it admits the step. `is_alone` returns whether no other job
    computes on this machine. It is called as a step that measures begins, and meanwhile: other jobs disturb it.
    """

    def __init__(
        self,
        steps: Iterable[PreparationStep | LaterStep],
        *,
        work_dir: Path,
        start: Start = start_limited,
    ) -> None:
        self._steps = deque(steps)
        self._work_dir = work_dir
        self._start = start
        self.log_path = work_dir / "prepare.log"  # output of the processes
        self._results: Results = {}
        self._step: PreparationStep | None = None  # the current step
        self._process: LimitedProcess | None = None
        self._memory_nbytes = 0  # that the process may take
        self._began_s = 0.0
        self._stood_still_s = 0.0  # halted time since then
        self._halted_at: float | None = None
        self._computed_s = 0.0  # by earlier processes
        self._log_offset = 0  # start of the current process's output
        self.admit: Admit = half_of_the_machine
        self.is_alone: Callable[[], bool] = lambda: True
        self._looked_s = 0.0  # when `is_alone` was called last
        self.waits_for_memory = False
        self.warnings: list[str] = []

    @property
    def process(self) -> LimitedProcess | None:
        """The running process, if any."""
        return self._process

    @property
    def is_halted(self) -> bool:
        """Returns whether the preparation is halted."""
        return self._halted_at is not None

    @property
    def uses_cores(self) -> bool:
        """Returns whether the current step computes, and does not wait for the network."""
        step = self._step if self._process is not None else next(iter(self._steps), None)
        return not (isinstance(step, PreparationStep) and step.name == DOWNLOAD_MODEL)

    @property
    def measures(self) -> bool:
        """Returns whether the current step measures times now, which would be wrong if the step were halted."""
        if self._process is None or self._step is None or self._step.instead is None:
            return False
        return self._step.measuring_path.exists()

    @property
    def computed_s(self) -> float:
        """Seconds that its processes ran without being halted. Downloads do not count."""
        return self._computed_s + (self._ran_s if self._process is not None and self.uses_cores else 0.0)

    def progress(self) -> dict[str, Any] | None:
        """Returns the current `step`, with `percent` and the `line` of a `file` if the step reports these."""
        if self._process is None or self._step is None:
            return None
        told: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(self._step.progress_path.read_text())
        return {"step": self._step.kind_of_work, **{name: told.get(name) for name in ("percent", "line", "file")}}

    def halt(self) -> None:
        """Halts the preparation until `proceed`: no step begins, and the running process is stopped."""
        if self._halted_at is None:
            self._halted_at = time.monotonic()
            if self._process is not None:
                self._process.halt()

    def proceed(self) -> None:
        """Continues after `halt`."""
        if self._halted_at is not None:
            self._stood_still_s += time.monotonic() - self._halted_at
            self._halted_at = None
            if self._process is not None:
                self._process.proceed()

    @property
    def _ran_s(self) -> float:
        """Seconds that the current process ran without being halted."""
        until_s = time.monotonic() if self._halted_at is None else self._halted_at
        return until_s - self._began_s - self._stood_still_s

    def poll(self) -> Results | None:
        """Advances the preparation. Returns all results once every step is done, else None. Raises PreparationError."""
        if not self._steps:
            return self._results  # an earlier call returned the results, but its caller could not store them
        if self.is_halted:
            return None
        if self._process is None:
            if self._is_known() or (step := self._next_step()) is None:
                return self._go_on()
            if not self._begin(step):
                return None
        step = self._step
        assert step is not None
        try:
            if self.measures and time.monotonic() - self._looked_s >= _LOOK_S:
                self._look_for_others(step)
            if (code := self._poll(step)) is None:
                self._check_in_time(step)
                return None
            self._forget_process()
            self._results[step.name] = self._result(step, code)
        except PreparationError as error:
            if step.is_optional:
                self._forget_process()
                _LOG.warning("%s for another kind of box failed: %s", step.title, error)
                self._results[step.name] = {"ok": False, "error": {"code": error.code, "message": error.message}}
                return self._go_on()
            if not isinstance(error, StepFailedError) or step.instead is None:
                raise
            goes_on = step.instead_in_words or "It is done in another way"
            self._warn(f"{error.cause}. {goes_on}")
            _LOG.warning("its output is in %s", error.log_path)
            self._steps[0] = step.instead
            return self.poll()
        if step.kept is not None:
            step.kept.keep(self._results[step.name])
        return self._go_on()

    def stop(self) -> None:
        """Kills the running process, if any."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(ServerEndedError):
                self._process.wait()
            self._forget_process()

    def _forget_process(self) -> None:
        self._computed_s = self.computed_s
        self._process = None

    def _warn(self, warning: str) -> None:
        _LOG.warning("%s", warning)
        self.warnings.append(warning[0].upper() + warning[1:])

    def _check_in_time(self, step: PreparationStep) -> None:
        if self._ran_s > step.timeout_s:
            place = self._place()
            self.stop()
            cause = f"{step.title} did not end within {step.timeout_s} s{place}, and was killed"
            advice = _TIME_ADVICE.get(step.name, _OTHER_ADVICE)
            raise StepFailedError(f"{step.name}_timeout", cause, advice, self.log_path, is_timeout=True)

    def _go_on(self) -> Results | None:
        self._steps.popleft()
        return self.poll()

    def _is_known(self) -> bool:
        """Returns whether the next step's result is in its cache."""
        step = self._steps[0]
        if not isinstance(step, PreparationStep) or step.kept is None or (found := step.kept.find()) is None:
            return False
        self._results[step.name] = found
        return True

    def _next_step(self) -> PreparationStep | None:
        """Makes the next step from the results so far. Returns None if the step is not needed."""
        step = self._steps[0]
        if not isinstance(step, PreparationStep):
            self._work_dir.mkdir(parents=True, exist_ok=True)
            made = step(self._results)
            if made is None:
                return None
            self._steps[0] = step = made
        return step

    def _begin(self, step: PreparationStep) -> bool:
        """Starts a step. Returns False if it must wait for memory."""
        admitted_nbytes = self.admit(step)
        self.waits_for_memory = admitted_nbytes is None
        if admitted_nbytes is None:
            return False
        self._step, self._memory_nbytes = step, admitted_nbytes
        self._work_dir.mkdir(parents=True, exist_ok=True)
        self._launch(step, self._start)
        return True

    def _launch(self, step: PreparationStep, start: Start) -> None:
        step.result_path.unlink(missing_ok=True)
        step.progress_path.unlink(missing_ok=True)
        step.measuring_path.unlink(missing_ok=True)
        step.disturbed_path.unlink(missing_ok=True)
        if step.instead is not None:
            self._look_for_others(step)
        limited = LimitedCommand(
            command=step.command,
            home=self._work_dir,
            cpu_s=step.cpu_s,
            address_space_nbytes=_address_space_nbytes(step),
            memory_nbytes=self._memory_nbytes,
            passed_on=step.passed_on,
            sees_gpus=step.sees_gpus,
        )
        with self.log_path.open("ab") as log:
            self._log_offset = log.tell()
            self._process = start(limited, log)
        self._began_s, self._stood_still_s = time.monotonic(), 0.0

    def _look_for_others(self, step: PreparationStep) -> None:
        """Tells the process of a step that measures if another job computes now."""
        self._looked_s = time.monotonic()
        if not self.is_alone():
            with contextlib.suppress(OSError):  # a full disk; the times then count as undisturbed
                step.disturbed_path.touch()

    def _poll(self, step: PreparationStep) -> int | None:
        """Returns the exit code of the process if it has ended. If its server has ended, starts the step anew."""
        assert self._process is not None
        try:
            return self._process.poll()
        except ServerEndedError as error:
            self._warn(f"{step.title} begins anew, in a process of its own: {error}")
            self._launch(step, start_limited)
            return None

    def _result(self, step: PreparationStep, exit_code: int) -> dict[str, Any]:
        try:
            result = json.loads(step.result_path.read_text())
            if not result["ok"]:
                error = result["error"]
                told = PreparationError(error["code"], error["message"], error.get("param"))
        except (OSError, ValueError, TypeError, KeyError) as cause:
            raise self._failure(step, exit_code) from cause
        if not result["ok"]:
            raise told
        if exit_code != 0:
            raise self._failure(step, exit_code)
        found: dict[str, Any] = result
        return found

    def _failure(self, step: PreparationStep, exit_code: int) -> StepFailedError:
        cause, advice = self._describe(step, exit_code)
        is_timeout = exit_code == -signal.SIGXCPU
        return StepFailedError(f"{step.name}_failed", cause, advice, self.log_path, is_timeout=is_timeout)

    def _describe(self, step: PreparationStep, exit_code: int) -> tuple[str, str]:
        """Returns how a process without a result ended, and advice for the user."""
        if exit_code == -signal.SIGXCPU:
            advice = _TIME_ADVICE.get(step.name, _OTHER_ADVICE)
            return f"{step.title} used more than {step.cpu_s} s of CPU time{self._place()}, and was killed", advice
        limit_nbytes = None if step.sees_gpus else min(self._memory_nbytes, _address_space_nbytes(step))
        after_s = self._ran_s
        how = f"{step.title} {describe_process_end(exit_code, after_s=after_s, limit_nbytes=limit_nbytes)}"
        line = self._last_line()
        if reports_out_of_memory(line):
            limit = "" if limit_nbytes is None else f" of at most {limit_nbytes / GIB:.1f} GiB"
            return f"{how}, and left no result: it got no more memory{limit} ({line})", _MEMORY_ADVICE
        said = f"; last output line: {line}" if line else ""
        advice = _MEMORY_ADVICE if exit_code == -signal.SIGKILL else _OTHER_ADVICE
        return f"{how}, and left no result{said}", advice

    def _place(self) -> str:
        """Describes the last position in a file that the step reported, if any."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            told = json.loads(self._step.progress_path.read_text()) if self._step is not None else {}
            return f", at line {told['line']} of {told['file']} or soon after it"
        return ""

    def _last_line(self) -> str:
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_offset, size - _MOST_LOG_NBYTES))
            return last_line(log.read().decode(errors="replace"))
        return ""


def preparation_of(order: PreparationOrder, start: Start = start_limited) -> Preparation:
    """Makes a preparation of all steps. Deletes the dataset's folder."""
    shutil.rmtree(order.dataset_dir, ignore_errors=True)
    return Preparation(steps_of(order), work_dir=order.work_dir, start=start)


def _address_space_nbytes(step: PreparationStep) -> int:
    """Returns the address space that a step may map, in bytes: its memory, and the largest file of weights.

    Mapped weights take only addresses. Without them in the limit, a model with a file of half the machine's memory
    could not be checked.
    """
    weights = () if step.maps is None else step.maps.glob("*.safetensors")
    mapped_nbytes = max((path.stat().st_size for path in weights), default=0)
    return max(_LEAST_ADDRESS_SPACE_NBYTES, psutil.virtual_memory().total // 2) + mapped_nbytes
