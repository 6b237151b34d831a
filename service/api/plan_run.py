"""One plan for a request: its turns, its processes, the estimate that comes first, and an abandoned plan's end."""

import contextlib
import json
import logging
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from windlass.planner.question import (
    FAILURE,
    JobPlan,
    PlanFailure,
    PlanReport,
    PlanRequest,
    abandoned_path,
    estimate_path,
    progress_path,
)
from windlass.service.api.context import Context
from windlass.service.api.middleware import BusyError
from windlass.service.installation import node_of
from windlass.service.preparation import (
    MEASURE_BLOCKS,
    PLAN_JOB,
    Preparation,
    PreparationError,
    PreparationMemory,
    PreparationStep,
    StepFailedError,
    plan_steps_apart,
)
from windlass.service.validation import ApiError
from windlass.storage.sql import JobStatus
from windlass.storage.sql.repositories import JobRepository

_LOG = logging.getLogger(__name__)

_POLL_S = 0.01  # between two calls of `PlanRun.poll`
_POLL_MEASUREMENT_S = 0.1  # the same during a measurement, because that needs the cores
# How long a plan waits for its turn, or for memory that jobs and preparations hold.
_WAIT_S = 60.0
# How long it waits until others have measured, and for memory then. One measurement may take a minute.
_WAIT_TO_MEASURE_S = 300.0
# How long the process may go on with an abandoned plan. It looks before each simulation; killed, it would have
# to learn again what it knows of the models.
_ABANDONED_S = 5.0
_MOST_OUTPUT_NBYTES = 16384  # bytes of a failed planner's output that are logged
_AWAITS_MEASUREMENT = {"message": "waiting until another measurement has ended", "done": None, "total": None}


def no_job_runs(context: Context) -> bool:
    """Returns whether no job computes on this machine."""
    with context.database.read() as session:
        return not JobRepository(session).with_status(
            JobStatus.RUNNING, JobStatus.PAUSING, node=node_of(context.settings.home)
        )


class PlanRun:
    """The making of a plan in child processes. Threads may call its methods; `close` waits for a `poll` to end.

    The planner's process makes one plan after the other. Blocks are measured by another process, one measurement after
    the other, and meanwhile the planner's process makes other plans.
    """

    def __init__(self, context: Context, user: str | None, request: PlanRequest) -> None:
        """`user`: takes turns with others; None: the callers without keys."""
        self._context, self._limits, self._planner = context, context.limits, context.planner
        self._user, self._request = user, request
        self._folder = tempfile.TemporaryDirectory(dir=context.settings.home, prefix="plan-")
        self._work_dir = Path(self._folder.name)
        self._memory, self._turn = PreparationMemory(), ExitStack()
        self._preparation, self._warnings = self._begin(), list[str]()
        self._step: PreparationStep | None = None  # the last one that was to begin
        # Since when that waits, and the error once it has waited too long.
        self._waits: tuple[float, ApiError] | None = None
        self._was_asked_again = False
        self._told: dict[Path, bytes] = {}  # the content of files that was returned last
        self._is_done = False
        self._lock = threading.Lock()

    @property
    def warnings(self) -> list[str]:
        """Warnings about processes that died meanwhile."""
        return [*self._warnings, *self._preparation.warnings]

    @property
    def pause_s(self) -> float:
        """Seconds until the next call of `poll`."""
        return _POLL_MEASUREMENT_S if self._step is not None and self._step.name == MEASURE_BLOCKS else _POLL_S

    def poll(self) -> PlanReport | None:
        """Advances the making. Returns the plan once it is done. Raises the ApiError of a plan that cannot be made."""
        with self._lock:
            return None if self._is_done else self._poll()

    def _poll(self) -> PlanReport | None:
        try:
            results = self._preparation.poll()
        except StepFailedError as error:
            self._log_output(error.cause)
            if error.is_timeout:
                raise _failed(error.cause) from None
            self._ask_again(_no_memory() if error.lacks_memory else _failed(error.cause))
            return None
        except PreparationError as error:
            raise ApiError(error.message, param=error.param, code=error.code) from None
        if results is None:
            self._check_wait()
            return None
        if (failure := results[PLAN_JOB].get(FAILURE)) is not None:
            told = results[PLAN_JOB]["warnings"][0]
            self._log_output(told)
            if failure != PlanFailure.MEMORY:
                raise _failed(told)
            self._ask_again(_no_memory())
            return None
        self._is_done = True
        self._turn.close()
        plan = JobPlan.from_json(results[PLAN_JOB])
        if plan is None:
            raise ApiError(f"model: {'; '.join(results[PLAN_JOB]['warnings'])}", param="model", code="not_planned")
        return plan.report

    def estimate(self) -> JobPlan | None:
        """Returns what is told before the whole plan, if it was not returned before.

        It is the best plan by the cost model, the plan without its advice, or with its changes so far.
        """
        told = self._newly_told(estimate_path(self._work_dir / f"{PLAN_JOB}.json"))
        return None if told is None else JobPlan.from_json(told)

    def progress(self) -> Mapping[str, Any] | None:
        """Returns the progress of a measurement, if it was not returned before: `message`, `done` and `total`."""
        if self._step is None or self._step.name != MEASURE_BLOCKS:
            return None
        if self._waits is not None:
            is_new, self._told[self._work_dir] = self._work_dir not in self._told, b""
            return _AWAITS_MEASUREMENT if is_new else None
        return self._newly_told(progress_path(self._step.result_path))

    def close(self) -> None:
        """Ends the making if it is not done, and removes its files. It may take some seconds."""
        with self._lock:
            try:
                if not self._is_done:
                    self._abandon()
            finally:
                self._is_done = True
                self._preparation.stop()
                self._turn.close()
                self._folder.cleanup()

    # --- private: the caller holds the lock ---------------------------------------------------------------------------

    def _begin(self) -> Preparation:
        steps = plan_steps_apart(self._work_dir, self._request)
        preparation = Preparation(steps, work_dir=self._work_dir, start=self._planner.start)
        preparation.admit, preparation.is_alone = self._admit, self._is_alone
        return preparation

    def _admit(self, step: PreparationStep) -> int | None:
        """Takes the step's turn, and returns the memory that it gets; None: it must wait. The step before has ended."""
        self._turn.close()
        measures = step.name == MEASURE_BLOCKS
        began_s = time.monotonic() if self._waits is None or step is not self._step else self._waits[0]
        self._step, self._waits = step, None
        turns = self._limits.measurements if measures else self._limits.plans
        try:
            self._turn.enter_context(turns.entered(self._user))
        except BusyError as error:
            what = "blocks are measured for one plan at a time" if measures else "plans are made one by one"
            busy = ApiError(f"{what}: {error}", status=429, code="plan_in_progress", kind="requests")
            self._waits = began_s, busy
            return None
        nbytes = self._memory.grant(
            self._work_dir.name, None, step, lambda: self._preparation.process, is_box_free=False
        )
        if nbytes is None:
            self._turn.close()
            why = f"the plan was not made, as it waits for {self._memory.why_not(None)}; try again when less runs"
            self._waits = began_s, ApiError(why, status=503, code="no_memory")
        return nbytes

    def _is_alone(self) -> bool:
        """Returns whether no job computes on this machine. Returns False if that cannot be read."""
        try:
            return no_job_runs(self._context)
        except SQLAlchemyError:  # the plan itself needs no database
            return False

    def _check_wait(self) -> None:
        if self._waits is None or self._step is None:
            return
        began_s, error = self._waits
        most_s = _WAIT_TO_MEASURE_S if self._step.name == MEASURE_BLOCKS else _WAIT_S
        if time.monotonic() - began_s >= most_s:
            raise error

    def _ask_again(self, error: ApiError) -> None:
        """Asks the question once more, in a fresh process. Raises the error if that was done before."""
        if self._was_asked_again:
            raise error
        self._was_asked_again = True
        self._planner.renew()  # before another plan may begin in the old process
        self._turn.close()
        self._warnings = self.warnings
        self._preparation = self._begin()

    def _newly_told(self, path: Path) -> dict[str, Any] | None:
        """Returns the JSON object of a file, if it was not returned before."""
        try:
            told = path.read_bytes()
        except FileNotFoundError:
            return None
        if told == self._told.get(path):
            return None
        self._told[path] = told
        content: dict[str, Any] = json.loads(told)
        return content

    def _abandon(self) -> None:
        if self._step is None or self._step.name == MEASURE_BLOCKS:
            return  # what was measured so far is stored
        abandoned_path(self._step.result_path).touch()
        self._preparation.admit = lambda _step: None  # it shall not measure next
        until_s = time.monotonic() + _ABANDONED_S
        with contextlib.suppress(PreparationError):
            while self._preparation.process is not None and time.monotonic() < until_s:
                if self._preparation.poll() is not None:
                    return
                time.sleep(_POLL_S)

    def _log_output(self, cause: str) -> None:
        """Logs the end of a failed planner's output, because its folder is deleted with the request."""
        with contextlib.suppress(OSError):
            output = self._preparation.log_path.read_bytes()[-_MOST_OUTPUT_NBYTES:].decode(errors="replace")
            output = output or "(nothing; errors of its imports are in planner.log, beside the service's logs)"
            _LOG.error("a planner failed (%s); its output ended with:\n%s", cause, output)


def _no_memory() -> ApiError:
    return ApiError(
        "the plan was not made: the planner's process got no more memory, nor did a fresh one; try again when less "
        "runs on this machine",
        status=503,
        code="no_memory",
    )


def _failed(cause: str) -> ApiError:
    return ApiError(
        f"the plan was not made, because the planner failed: {cause}; the service's log has its output. Ask again, and "
        "report it if that does not help",
        status=500,
        code="planner_failed",
    )
