"""The findings of `windlass doctor` about this box. As a program, it prints them as JSON."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from windlass.service.installation import find_gpus, inspect_machine
from windlass.service.machine import check_limits
from windlass.service.machine.fleet.facts import Finding

_DEADLINE_S = 120.0


def findings_here() -> Sequence[Finding]:
    """Returns the findings about this box.

    With GPUs it takes some seconds, and another process looks: PyTorch, which tries them, stays out of this one.
    """
    if not find_gpus():
        return _look()
    command = [sys.executable, "-m", __name__]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
        return tuple(Finding.model_validate(finding) for finding in json.loads(result.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        text = f"`windlass doctor --quick` did not end well ({type(error).__name__}); run it on the box"
        return (Finding(text=text, is_problem=True),)


def _look() -> Sequence[Finding]:
    findings = check_limits(inspect_machine((Path("/dev/shm"),)))
    return tuple(
        Finding(
            text=f"{finding.what}: {finding.found}" + (f"; {finding.remedy}" if finding.remedy else ""),
            is_problem=finding.remedy is not None,
        )
        for finding in findings
    )


if __name__ == "__main__":
    print(json.dumps([finding.model_dump() for finding in _look()]))
