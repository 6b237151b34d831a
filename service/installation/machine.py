"""The machine's resources: cores, memory, disks and GPUs, as `windlass doctor` shows them."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from windlass.storage.ssd import is_device_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as the driver describes it."""

    name: str
    memory_nbytes: int
    driver_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The space on a file system."""

    path: Path
    total_nbytes: int
    free_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """A raw block device that jobs use as a whole."""

    path: Path
    nbytes: int | None  # None: the device does not exist
    may_be_used: bool  # this process may read and write it


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources that a job can use on this machine."""

    num_cores: int  # that this process may run on
    memory_nbytes: int
    available_memory_nbytes: int
    gpus: tuple[Gpu, ...]
    spaces: tuple[Space, ...]
    drives: tuple[Drive, ...]


def inspect_machine(paths: tuple[Path, ...], devices: tuple[Path, ...] = ()) -> Machine:
    """Inspects this machine, the file systems that hold `paths` or will hold them, and block devices."""
    memory = psutil.virtual_memory()
    return Machine(
        num_cores=num_cores(),
        memory_nbytes=memory.total,
        available_memory_nbytes=memory.available,
        gpus=find_gpus(),
        spaces=tuple(_space(path) for path in paths),
        drives=tuple(_drive(path) for path in devices),
    )


def num_cores() -> int:
    """Returns the number of cores that this process may run on.

    Containers and taskset allow fewer than the machine has.
    """
    return len(os.sched_getaffinity(0))


def mount_point(path: Path) -> Path:
    """Returns where the file system is mounted that holds a path, or will hold it."""
    existing = _existing(path).resolve()
    return next(folder for folder in (existing, *existing.parents) if folder.is_mount())


def told_new_ssd_dirs(paths: Iterable[Path], home: Path) -> list[str]:
    """Names each SSD directory that will be made, and its disk. If its SSD is not mounted, that is the wrong one."""
    new = [path for path in paths if not (path.exists() or is_device_path(path) or path.is_relative_to(home))]
    return [
        f"! ssd_dirs: {path} does not exist and will be made on the disk mounted at {mount_point(path)}; if its SSD "
        "should be mounted there, end windlass and mount it"
        for path in new
    ]


def find_gpus() -> tuple[Gpu, ...]:
    """Lists the NVIDIA GPUs that jobs may use. CUDA_VISIBLE_DEVICES can hide others."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return ()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    if visible is not None:
        command.append(f"--id={visible}")
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        # The tool is installed but no driver answers, so the machine has no usable GPU.
        return ()
    return tuple(_parse_gpu(line) for line in result.stdout.splitlines() if line.strip())


def models_of(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """Returns the names of the GPUs' models, each once."""
    return tuple(sorted({gpu.name for gpu in gpus}))


def _parse_gpu(line: str) -> Gpu:
    name, memory_mib, driver_version = (field.strip() for field in line.split(","))
    return Gpu(name=name, memory_nbytes=int(memory_mib) * 1024**2, driver_version=driver_version)


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _space(path: Path) -> Space:
    usage = shutil.disk_usage(_existing(path))
    return Space(path=path, total_nbytes=usage.total, free_nbytes=usage.free)


def _drive(path: Path) -> Drive:
    if not path.is_block_device():
        return Drive(path=path, nbytes=None, may_be_used=False)
    number = path.stat().st_rdev
    # Sysfs shows the size to every user, always in sectors of 512 bytes.
    size = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/size").read_text()
    return Drive(path=path, nbytes=int(size) * 512, may_be_used=os.access(path, os.R_OK | os.W_OK))
