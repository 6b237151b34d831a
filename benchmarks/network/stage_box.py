"""Runs one box of a job over several in this process: `python -m benchmarks.network.stage_box FILE BOX`

FILE has the pickled `StageJob`. The first box prints its outcome.
"""

import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.simulator.slow_machine import SlowMachine
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.job import JobSpec
from windlass.actors.runtime.boxes import LinkConfig, run_local_box

_FAST = 1e9  # bytes per second: does not slow down copies


@dataclass(frozen=True, slots=True, kw_only=True)
class StageJob:
    """A job over boxes, as each of them sees it, and the declared speed of their compute."""

    specs: tuple[JobSpec, ...]
    links: tuple[LinkConfig, ...]
    products_per_s: float  # of matrix elements with tokens


def main(file: str, box: str) -> None:
    """Runs the box until the job ends."""
    job: StageJob = pickle.loads(Path(file).read_bytes())
    machine = SlowMachine(products_per_s=job.products_per_s, h2d_bytes=_FAST, d2h_bytes=_FAST)
    # Skip the architecture check, because it computes too and would be slow.
    with patch.object(gpu_worker, "check_architecture", lambda *_: None), machine.running():
        outcome = run_local_box(job.specs, int(box), job.links[int(box)].listen())
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
