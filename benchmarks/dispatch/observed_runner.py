"""Runs windlass as a contender whose actors are observed.

`python -m benchmarks.dispatch.observed_runner FOLDER SSD_DIR... --counts FOLDER [option of windlass_runner ...]`
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.dispatch.message_counts import COUNTS_FOLDER
from benchmarks.peers import windlass_runner
from windlass.actors.job import JobSpec


def main() -> None:
    """Train the workload as `windlass_runner` does, and copy the counts of messages to the folder `--counts`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch.observed_runner", description=__doc__)
    parser.add_argument("--counts", type=Path, required=True, help="where a copy of the counts is to be kept")
    options, sys.argv[1:] = parser.parse_known_args()
    train = windlass_runner.train

    def train_observed(workload: Any, spec: JobSpec, *arguments: Any, **named: Any) -> None:
        from benchmarks.dispatch.observed_actors import observe_runners  # Ray's environment is set by now

        observe_runners()
        train(workload, spec, *arguments, **named)
        shutil.rmtree(options.counts, ignore_errors=True)  # of an earlier round
        shutil.copytree(Path(spec.job_dir) / COUNTS_FOLDER, options.counts)

    windlass_runner.train = train_observed
    windlass_runner.main()


if __name__ == "__main__":
    main()
