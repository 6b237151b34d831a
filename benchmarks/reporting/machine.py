"""Describes the machine in a report, without anything that identifies it or its owner."""

import os
import platform
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "transformers", "ray", "deepspeed", "numpy")


def describe_machine(directory: Path) -> list[tuple[str, str]]:
    """Returns (property, value) rows: processor, memory, the file system under `directory`, kernel, versions."""
    return [
        ("processor", f"{_cpu_model()}, {num_cores()} cores"),
        ("memory", f"{_memory_nbytes() / 2**30:.1f} GiB"),
        ("disk", f"{file_system(directory)} file system"),
        ("kernel", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("Python", platform.python_version()),
        *((name, _version(name)) for name in _PACKAGES),
    ]


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def load_of_last_minute() -> str:
    """Returns the load average of the last minute and the number of cores: "0.31 on 2 cores"."""
    return f"{os.getloadavg()[0]:.2f} on {num_cores()} cores"


def file_system(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Returns the type of the file system that contains `directory`: "ext4"."""
    resolved = directory.resolve()
    best, kind = -1, "unknown"
    for line in mounts.read_text().splitlines():
        _, mount, file_system_type, *_ = line.split(" ")
        # Mount points have spaces in octal.
        path = Path(mount.replace("\\040", " "))
        if resolved.is_relative_to(path) and len(path.parts) >= best:
            best, kind = len(path.parts), file_system_type
    return kind


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
