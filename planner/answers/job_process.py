"""Plans a job in a process of its own.

`python -m windlass.planner.answers.job_process --question FILE --result FILE`
"""

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from windlass.actors.lifecycle import NICENESS_BESIDE_COMPUTE
from windlass.engine.data import DatasetError
from windlass.engine.memory_estimate import DeviceNeedUnknownError
from windlass.engine.model import UnsupportedArchitectureError
from windlass.planner.answers.what_if import with_what_if
from windlass.planner.planning import (
    AbandonedError,
    CannotBePlannedError,
    TimesLackError,
    answer_question,
    arguments_of,
    plan_job,
    watcher_of,
)
from windlass.planner.profiling import UnusableConfigError
from windlass.planner.question import (
    FAILURE,
    LACKS_TIMES,
    JobPlan,
    KeptShapes,
    PlanFailure,
    PlanRequest,
    abandoned_path,
    disturbed_path,
    estimate_path,
)
from windlass.planner.solver import forget_programs
from windlass.storage.files import write_atomically
from windlass.storage.memory import is_out_of_memory


def main() -> None:
    """Answers the question that the command line names; see `_run`. The exit code is 0."""
    _run(sys.argv[1:], None)


def begin() -> Callable[[Sequence[str]], None]:
    """Returns a function like `main` for one command line after the other. It keeps what it knows of the models."""
    return functools.partial(_run, kept_shapes=KeptShapes())


def _run(arguments: Sequence[str], kept_shapes: KeptShapes | None) -> None:
    """Writes {"ok": true, ...} or {"ok": false, "error": {code, message, param}}.

    The first form has a plan, or `warnings` if no plan could be made. If the request leaves measurements to another
    process, and times lack, it has LACKS_TIMES. Once there is a file of `abandoned_path`, an answer without a plan
    comes. An error that the request did not cause is written as FAILURE, because a job goes on without a plan. Its
    traceback goes to the process's output.
    """
    options = arguments_of(arguments, "Plan a job.")
    estimate, abandoned = estimate_path(options.result), abandoned_path(options.result)
    disturbed = disturbed_path(options.result)

    def tell(plan: JobPlan) -> None:
        try:
            write_atomically(estimate, json.dumps(plan.to_json()))
        except OSError as error:  # the plan itself may still succeed
            print(f"the estimate could not be written: {error}", file=sys.stderr)

    def check() -> None:
        if abandoned.exists():
            raise AbandonedError

    def answer_it() -> dict[str, Any]:
        request = PlanRequest.from_json(json.loads(options.question.read_text()))
        if request.running is not None:
            os.nice(NICENESS_BESIDE_COMPUTE)
        tell_it = tell if request.tells_estimate else None
        try:
            return plan_job(
                request,
                options.result.parent,
                options.measuring,
                kept_shapes,
                with_what_if,
                watcher_of(tell_it, check),
                lambda: request.is_alone and not disturbed.exists(),
                tell_it,
            ).to_json()
        except AbandonedError:
            return {"warnings": ["the plan was abandoned"]}
        except TimesLackError:
            return {LACKS_TIMES: True}
        except (DatasetError, DeviceNeedUnknownError, CannotBePlannedError) as error:
            # For example, operators whose output shapes depend on the data. The job then runs without a plan.
            return {"warnings": [f"no plan was made: {error}"]}
        except (UnsupportedArchitectureError, UnusableConfigError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the service tells it apart by FAILURE
            traceback.print_exc()
            kind = PlanFailure.MEMORY if is_out_of_memory(error) else PlanFailure.ERROR
            return {"warnings": [f"no plan was made: {type(error).__name__}: {error}"], FAILURE: kind}

    try:
        answer_question(options, answer_it)
    finally:
        forget_programs()


if __name__ == "__main__":
    main()
