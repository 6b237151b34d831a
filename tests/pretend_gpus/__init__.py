"""Simulated GPUs for tests of the real product: jobs get GPUs as usual, and only the computation runs on the CPU.

The service finds them through our `nvidia-smi`, which lists them. Ray gets their number and does not check it. In the
processes of jobs, `sitecustomize.py` of this folder makes a worker with a GPU compute on the CPU. It also records the
GPUs that each process of a job sees.
"""

import os
from collections.abc import Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent
# Set for the processes of the product; the folder's two programs also contain the name of this variable.
_COUNT = "TEST_PRETEND_GPUS"
_VISIBLE_PREFIX = "visible-gpus-"
_PROCESS_PREFIX = "process-"


def pretend_gpus(count: int) -> dict[str, str]:
    """Returns the environment variables, added to its own, with which a process sees that many GPUs."""
    paths = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    joined = {name: os.pathsep.join(filter(None, (str(_FOLDER), path))) for name, path in paths.items()}
    return {**joined, _COUNT: str(count)}


def visible_gpus(job_dir: Path) -> Mapping[str, str]:
    """Returns CUDA_VISIBLE_DEVICES of each process of a job, by the actor's name."""
    found = job_dir.glob(f"{_VISIBLE_PREFIX}*")
    return {path.name.removeprefix(_VISIBLE_PREFIX).replace("+", "/"): path.read_text() for path in found}


def process_of(job_dir: Path, actor: str) -> int:
    """Returns the process id of an actor in the job's last attempt."""
    return int(Path(job_dir, _PROCESS_PREFIX + _file_name(actor)).read_text())


def _file_name(actor: str) -> str:
    """Returns the part of a file's name that stands for an actor: those of other boxes are called like "b1/gpu-0"."""
    return actor.replace("/", "+")
