"""One plan for a request: the planner's process, the estimate that comes first, and the end of an abandoned plan."""

import contextlib
import json
import logging
import tempfile
import threading
import time
from pathlib import Path

from windlass.planner.question import JobPlan, PlanReport, PlanRequest, abandoned_path, estimate_path
from windlass.service.installation import Settings
from windlass.service.preparation import (
    PLAN_JOB,
    Preparation,
    PreparationError,
    PreparationMemory,
    StepFailedError,
    plan_step,
)
from windlass.service.preparation.sandbox import WarmProcess
from windlass.service.validation import ApiError

_LOG = logging.getLogger(__name__)

POLL_S = 0.01  # between two calls of `PlanRun.poll`
# How long a plan waits for memory that jobs and preparations hold.
_WAIT_FOR_MEMORY_S = 60.0
# How long the process may go on with an abandoned plan. It looks before each simulation; killed, it would have
# to learn again what it knows of the models.
_ABANDONED_S = 5.0
_MOST_OUTPUT_NBYTES = 4096  # bytes of a failed planner's output that are logged


class PlanRun:
    """The making of a plan in a child process. Threads may call its methods; `close` waits for a `poll` to end."""

    def __init__(self, settings: Settings, planner: WarmProcess, request: PlanRequest) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=settings.home, prefix="plan-")
        work_dir = Path(self._folder.name)
        self._step = plan_step(work_dir, request)
        self._preparation = Preparation([self._step], work_dir=work_dir, start=planner.start)
        self._memory, self._began_s = PreparationMemory(), time.monotonic()
        self._preparation.admit = lambda step: self._memory.grant(
            work_dir.name, None, step, lambda: self._preparation.process, is_box_free=False
        )
        self._told: bytes | None = None  # the last estimate
        self._is_done = False
        self._lock = threading.Lock()

    @property
    def warnings(self) -> list[str]:
        """Warnings about processes that died meanwhile."""
        return self._preparation.warnings

    def poll(self) -> PlanReport | None:
        """Advances the making. Returns the plan once it is done. Raises the ApiError of a plan that cannot be made."""
        with self._lock:
            return None if self._is_done else self._poll()

    def _poll(self) -> PlanReport | None:
        try:
            results = self._preparation.poll()
        except StepFailedError as error:
            _tell_log(error)
            raise ApiError(str(error), status=500, code=error.code) from None
        except PreparationError as error:
            raise ApiError(error.message, param=error.param, code=error.code) from None
        if results is None:
            if self._preparation.waits_for_memory and time.monotonic() - self._began_s >= _WAIT_FOR_MEMORY_S:
                raise ApiError(
                    f"the plan was not made, as it waits for {self._memory.why_not(None)}; try again when less runs",
                    status=503,
                    code="no_memory",
                )
            return None
        self._is_done = True
        plan = JobPlan.from_json(results[PLAN_JOB])
        if plan is None:
            raise ApiError(f"model: {'; '.join(results[PLAN_JOB]['warnings'])}", param="model", code="not_planned")
        return plan.report

    def estimate(self) -> PlanReport | None:
        """Returns the best plan by the cost model, if there is one that was not returned before."""
        try:
            told = estimate_path(self._step.result_path).read_bytes()
        except FileNotFoundError:
            return None
        if told == self._told:
            return None
        self._told = told
        plan = JobPlan.from_json(json.loads(told))
        return None if plan is None else plan.report

    def close(self) -> None:
        """Ends the making if it is not done, and removes its files. It may take some seconds."""
        with self._lock:
            try:
                if not self._is_done:
                    self._abandon()
            finally:
                self._is_done = True
                self._preparation.stop()
                self._folder.cleanup()

    def _abandon(self) -> None:
        abandoned_path(self._step.result_path).touch()
        until_s = time.monotonic() + _ABANDONED_S
        with contextlib.suppress(PreparationError):
            while self._preparation.process is not None and time.monotonic() < until_s:
                if self._preparation.poll() is not None:
                    return
                time.sleep(POLL_S)


def _tell_log(error: StepFailedError) -> None:
    """Logs the end of a failed planner's output, because its folder is deleted with the request."""
    with contextlib.suppress(OSError):
        output = error.log_path.read_bytes()[-_MOST_OUTPUT_NBYTES:].decode(errors="replace")
        _LOG.warning("a planner failed (%s); its output ended with:\n%s", error.cause, output)
