"""Checks whether a job fits its budgets, before it starts: `python -m windlass.actors.job.check_budgets`.

It is for jobs without a plan, on machines that were not measured. A plan respects the budgets by itself.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from windlass.actors.job.context import make_context
from windlass.actors.job.device_memory_check import require_device_room
from windlass.actors.job.spec import JobSpec
from windlass.engine.memory_estimate import DeviceNeedUnknownError
from windlass.engine.memory_plan import PlanError
from windlass.engine.model import partition_folder


def check_budgets(spec: JobSpec) -> list[str]:
    """Runs the job on shapes only and returns warnings. The job's dataset must be prepared.

    Raises:
        PlanError: a budget is too small; the text says for what, and which value to set.
    """
    partition = partition_folder(spec.model_dir, spec.training.precision)
    context = make_context(spec, partition.layout, "")
    try:
        require_device_room(context, partition)
    except DeviceNeedUnknownError as error:
        return [f"the budget of device memory could not be checked: {error}"]
    return []


def main() -> None:
    """Writes {"ok": true, "warnings": […]} or {"ok": false, "error": {code, message, param}}; exit code 0."""
    parser = argparse.ArgumentParser(description="Check whether a job's budgets can hold it.")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    result: dict[str, Any]
    try:
        result = {"ok": True, "warnings": check_budgets(TypeAdapter(JobSpec).validate_json(options.spec.read_text()))}
    except PlanError as error:
        result = {"ok": False, "error": {"code": error.code, "message": str(error), "param": error.param}}
    options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
