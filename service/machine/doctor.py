"""The machine's measured hardware profile, and system limits that can keep jobs from running well."""

import json
import os
import re
import resource
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.actors.job import calibrated, disk_of
from windlass.amounts import GB, GIB
from windlass.planner.hardware import Gpus, Hardware, Host, Pcie, Ssds, YamlFileError, load
from windlass.planner.profiling import bytes_per_s_together
from windlass.service.installation import HARDWARE_FILE, Machine, Settings
from windlass.service.jobs import MachineResources, threads_of
from windlass.service.validation import ReportedError
from windlass.storage.ids import Precision
from windlass.storage.memory import explain_process_end, memory_available_nbytes
from windlass.storage.ssd import Calibration

_DEADLINE_S = 600.0
_ENOUGH_DESCRIPTORS = 4096
# Bytes of locked memory for the rings of io_uring: some pages for each of a server's threads.
_ENOUGH_LOCKED_NBYTES = 1 << 20
_MOUNTS = Path("/proc/mounts")
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")  # of all shared memory


class DoctorError(ReportedError):
    """A measurement failed. The text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A system property that jobs depend on. `remedy`: what to do if it is insufficient."""

    what: str
    found: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdMeasurement:
    """The measurement of an SSD directory or drive. `disk` is equal for entries on the same disk."""

    path: Path
    disk: int
    free_nbytes: int
    calibration: Calibration


def measure_hardware(
    settings: Settings, tell: Callable[[str], None], *, precision: Precision = Precision.BF16
) -> Hardware:
    """Measures the machine's profile.

    `tell` gets a line for the user before each slow step. `precision`: in which the device computes.

    Raises:
        DoctorError: the device or an SSD could not be measured.
    """
    tell(f"measuring what the device (in {precision}), its link, the memory and the optimizer do (some ten seconds)")
    rates = _rates(settings, precision)
    tell(f"the link to the device moves {rates['duplex_bytes'] / GB:.1f} GB/s both ways at once")
    calibrations: dict[int, Calibration] = {}  # by disk
    ssds = []
    for path in settings.ssd_dirs:
        tell(f"measuring {path} (some seconds, and only once)")
        ssds.append(_measure_ssd(path, calibrations))
    by_disk = {ssd.disk: ssd.path for ssd in ssds}
    together = None
    if len(by_disk) > 1:
        tell(f"measuring {len(by_disk)} SSDs at once")
        try:
            together = bytes_per_s_together(list(by_disk.values()))
        except (OSError, RuntimeError) as error:
            raise DoctorError(f"the SSDs could not be measured together: {error}") from error
    return hardware_of(rates, memory_nbytes=memory_available_nbytes(), ssds=ssds, together_bytes_per_s=together)


def hardware_of(
    rates: dict[str, Any],
    *,
    memory_nbytes: int,
    ssds: Sequence[SsdMeasurement],
    together_bytes_per_s: float | None = None,
) -> Hardware:
    """Makes a profile from measurements. Directories on one disk share its rate, and all SSDs count as the slowest one.

    `together_bytes_per_s`: the rate of all disks while all were busy; None: there is one disk.

    Raises:
        DoctorError: no memory is free, or no space on an SSD.
    """
    if memory_nbytes <= 0:
        raise DoctorError("no memory is free that jobs could take; close other programs, or raise the group's limit")
    if full := [str(ssd.path) for ssd in ssds if ssd.free_nbytes <= 0]:
        raise DoctorError(f"nothing is free on {', '.join(full)}; delete jobs or files there")
    sharing = Counter(ssd.disk for ssd in ssds)

    def slowest(of: Callable[[SsdMeasurement], float]) -> float:
        return min(of(ssd) / sharing[ssd.disk] for ssd in ssds)

    alone = sum({ssd.disk: ssd.calibration.mixed_bytes_per_s for ssd in ssds}.values())
    combined = alone if together_bytes_per_s is None else min(alone, together_bytes_per_s)
    device_nbytes = rates["device_nbytes"] or memory_nbytes
    return Hardware(
        gpus=Gpus(
            count=rates["num_devices"],
            memory_gib=_rounded(device_nbytes / GIB),
            tflops=_rounded(rates["flops"] / 1e12),
            fp32_tflops=None if rates["fp32_flops"] is None else _rounded(rates["fp32_flops"] / 1e12),
            name=rates["device"],
        ),
        host=Host(
            memory_gib=_rounded(memory_nbytes / GIB),
            memory_gb_per_s=_rounded(rates["memory_bytes"] / GB),
            adam_params_per_s=_rounded(rates["adam_params"]),
        ),
        pcie=Pcie(
            h2d_gb_per_s=_rounded(rates["h2d_bytes"] / GB),
            d2h_gb_per_s=_rounded(rates["d2h_bytes"] / GB),
            # Where the device is the CPU, copies in both directions share cores, and their time counts as the cores'
            # time.
            duplex_gb_per_s=_rounded(rates["duplex_bytes"] / GB) if rates["num_devices"] else None,
        ),
        ssds=Ssds(
            count=len(ssds),
            read_gb_per_s=_rounded(slowest(lambda ssd: ssd.calibration.read_bytes_per_s) / GB),
            write_gb_per_s=_rounded(slowest(lambda ssd: ssd.calibration.write_bytes_per_s) / GB),
            capacity_gib=_rounded(slowest(lambda ssd: ssd.free_nbytes) / GIB),
            combined_gb_per_s=_rounded(combined / GB),
            cpu_s_per_gb=_rounded(statistics.fmean(ssd.calibration.cpu_s_per_byte for ssd in ssds) * GB),
        ),
    )


def measured_hardware(settings: Settings) -> Hardware | None:
    """Returns this machine's stored profile, or None if it is missing or unreadable."""
    try:
        return load(Hardware, settings.home / HARDWARE_FILE)
    except YamlFileError:
        return None


def check_limits(machine: Machine) -> list[Finding]:
    """Returns the system's limits that can affect jobs."""
    limits = [_shared_memory(machine), _huge_pages(), _descriptors(), _locked_memory(), _memory_limit(machine)]
    return [*([_gpu_use()] if machine.gpus else []), *limits]


def _rates(settings: Settings, precision: Precision) -> dict[str, Any]:
    kernels = str(settings.home / "kernels")
    resources = MachineResources.here(settings)
    _, each = threads_of(settings, resources)
    threads = str(settings.num_cpu_optimizers * each)
    command = [sys.executable, "-m", "windlass.planner.profiling.measure_machine", "--kernel-dir", kernels]
    command += ["--optimizer-threads", threads, "--precision", precision]
    if resources.num_gpus:
        command.append("--gpu")
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise DoctorError(f"the device could not be measured within {_DEADLINE_S:g} s") from None
    if result.returncode != 0:
        why = explain_process_end(result.returncode, result.stderr)
        raise DoctorError(f"the device could not be measured: {why}")
    rates: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return rates


def _measure_ssd(path: Path, calibrations: dict[int, Calibration]) -> SsdMeasurement:
    try:
        with calibrated(path, calibrations) as (volume, calibration):
            return SsdMeasurement(
                path=path, disk=disk_of(path), free_nbytes=volume.free_nbytes(), calibration=calibration
            )
    except (OSError, RuntimeError) as error:
        raise DoctorError(f"{path} could not be measured: {error}") from error


def _gpu_use() -> Finding:
    # Imported here, because it imports PyTorch, which takes seconds.
    from windlass.engine.device import GpuUnusableError, compute_device

    try:
        compute_device(uses_gpu=True)
    except GpuUnusableError as error:
        return Finding(what="PyTorch", found="cannot use the GPU", remedy=str(error))
    return Finding(what="PyTorch", found="can use the GPU")


def _shared_memory(machine: Machine) -> Finding:
    space = next(space for space in machine.spaces if space.path == Path("/dev/shm"))
    found = f"{space.total_nbytes / GIB:.1f} GiB for arenas"
    if space.total_nbytes >= machine.memory_nbytes // 4 * 3:
        return Finding(what="shared memory", found=found)
    remedy = "jobs may not use all memory: `mount -o remount,size=90% /dev/shm`, or a container's --shm-size"
    return Finding(what="shared memory", found=found, remedy=remedy)


def _huge_pages() -> Finding:
    """Checks whether arenas get huge pages: as their file system is mounted, or because jobs make them."""
    what, mode = "huge pages", _shm_huge_mode()
    found = f"/dev/shm has huge={mode}"
    enabled = _SHMEM_ENABLED.read_text() if _SHMEM_ENABLED.is_file() else ""
    harm = "jobs start later, and copies and SSDs are slower with pages of 4 KiB"
    if "[deny]" in enabled:
        remedy = f"{harm}: `echo never > {_SHMEM_ENABLED}` lets them use larger ones"
        return Finding(what=what, found="denied to shared memory", remedy=remedy)
    if "[force]" in enabled or mode in ("always", "within_size"):
        return Finding(what=what, found=found)
    if _kernel_is_at_least(6, 1):
        return Finding(what=what, found=f"{found}; jobs make them")
    if mode == "advise" and _kernel_is_at_least(5, 14):
        return Finding(what=what, found=found)
    remedy = f"{harm}: `mount -o remount,huge=within_size /dev/shm`, or Linux 6.1"
    return Finding(what=what, found=found, remedy=remedy)


def _shm_huge_mode() -> str:
    """Returns the mount option `huge` of /dev/shm. The kernel does not list it if it is "never"."""
    for line in _MOUNTS.read_text().splitlines():
        _, directory, _, options, *_ = line.split()
        if directory == "/dev/shm" and (match := re.search(r"\bhuge=(\w+)", options)):
            return match[1]
    return "never"


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = "open files"
    if soft == resource.RLIM_INFINITY:
        return Finding(what=what, found="any number")
    if soft >= _ENOUGH_DESCRIPTORS:
        return Finding(what=what, found=str(soft))
    how = _how_to_raise(hard, _ENOUGH_DESCRIPTORS, f"ulimit -n {_ENOUGH_DESCRIPTORS}")
    return Finding(what=what, found=str(soft), remedy=f"Ray needs some thousand: {how}")


def _locked_memory() -> Finding:
    """Checks the limit of locked memory, which only rings of io_uring before Linux 5.12 need.

    The GPU's driver pins the arena itself, and direct reads and writes do not count against this limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    what = "locked memory"
    found = "any amount" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:g} MiB"
    if _kernel_is_at_least(5, 12):
        return Finding(what=what, found=f"{found}; jobs need none of it on this kernel")
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_LOCKED_NBYTES:
        return Finding(what=what, found=found)
    how = _how_to_raise(hard, _ENOUGH_LOCKED_NBYTES, f"ulimit -l {_ENOUGH_LOCKED_NBYTES // 1024}")
    remedy = f"SSD servers may get no io_uring, and use more threads: {how}, or Linux 5.12"
    return Finding(what=what, found=found, remedy=remedy)


def _kernel_is_at_least(*version: int) -> bool:
    match = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return match is None or tuple(map(int, match.groups())) >= version


def _how_to_raise(hard: int, enough: int, command: str) -> str:
    may_raise = hard == resource.RLIM_INFINITY or hard >= enough
    return f"`{command}`" if may_raise else "an administrator may raise the hard limit"


def _memory_limit(machine: Machine) -> Finding:
    allowed = memory_available_nbytes()
    what, found = "memory that jobs may take", f"{allowed / GIB:.1f} GiB"
    if allowed >= machine.available_memory_nbytes // 10 * 9:
        return Finding(what=what, found=found)
    free = f"{machine.available_memory_nbytes / GIB:.1f} GiB"
    return Finding(what=what, found=found, remedy=f"{free} are free; raise the control group's limit (docker --memory)")


def _rounded(value: float) -> float:
    """Rounds to four digits, because measurements are no more precise."""
    return float(f"{value:.4g}")
