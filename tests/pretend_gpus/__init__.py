"""GPUs that are not there, for tests of the real product: what is given to jobs is real, only the computing is not.

The service finds them as it finds real ones, because an `nvidia-smi` of ours lists them. Ray is told of them and does
not check. In the processes of jobs, `sitecustomize.py` of this folder makes a worker that was given a GPU compute on
the CPU, and notes which GPUs each process of a job sees.
"""

import os
from collections.abc import Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent
# Set for the processes of the product; the name of the folder's environment variable is in its two programs too.
_COUNT = "TEST_PRETEND_GPUS"
_VISIBLE_PREFIX = "visible-gpus-"


def pretend_gpus(count: int) -> dict[str, str]:
    """Returns what a process's environment must hold, besides its own, to see that many GPUs."""
    paths = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    joined = {name: os.pathsep.join(filter(None, (str(_FOLDER), path))) for name, path in paths.items()}
    return {**joined, _COUNT: str(count)}


def visible_gpus(job_dir: Path) -> Mapping[str, str]:
    """Returns CUDA_VISIBLE_DEVICES of each process of a job, by the actor's name."""
    return {path.name.removeprefix(_VISIBLE_PREFIX): path.read_text() for path in job_dir.glob(f"{_VISIBLE_PREFIX}*")}
