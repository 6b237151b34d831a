"""The facts of this box, as its agent sends them to the head, and as the head shows its own."""

import platform
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import psutil

from windlass.amounts import GIB
from windlass.planner.hardware import Hardware
from windlass.service.installation import Settings, find_gpus, link_host_of, num_cores
from windlass.service.machine import measured_hardware
from windlass.service.machine.fleet.facts import BoxFacts, Finding, GpuFacts, SsdFacts
from windlass.service.machine.fleet.findings import findings_here
from windlass.service.machine.fleet.ssd_ledger import written_by_ssd
from windlass.storage.integrity import StoreError
from windlass.storage.memory import directory_free_nbytes, directory_nbytes
from windlass.storage.ssd import Volume, device_nbytes, has_volume, is_block_device

# Seconds after which GPUs are listed, and the system's limits checked, again.
_LASTS_S = 600.0
# Seconds that the first answer waits for the findings.
_FIRST_WAIT_S = 1.0


def facts_of_this_box(settings: Settings) -> BoxFacts:
    """Measures this box. With GPUs it takes some seconds."""
    return _facts(settings, _gpus_here(), findings_here())


class FactsHere:
    """The facts of this box for a process that needs them often.

    A thread lists the GPUs and looks for findings, so that `read` returns soon, with the last ones. The first call
    waits a second for them.
    """

    def __init__(self, settings: Settings, *, look: Callable[[], Sequence[Finding]] = findings_here) -> None:
        self._settings = settings
        self._look = look
        self._gpus: tuple[GpuFacts, ...] = ()
        self._findings: Sequence[Finding] = ()
        self._looked_at: float | None = None
        self._lock = threading.Lock()

    def read(self) -> BoxFacts:
        """Returns the facts, with the space that is free now."""
        with self._lock:
            is_first, now_s = self._looked_at is None, time.monotonic()
            thread = None
            if self._looked_at is None or now_s - self._looked_at > _LASTS_S:
                self._looked_at = now_s
                thread = threading.Thread(target=self._look_again, name="findings", daemon=True)
                thread.start()
        if is_first and thread is not None:
            thread.join(_FIRST_WAIT_S)
        with self._lock:
            gpus, findings = self._gpus, self._findings
        return _facts(self._settings, gpus, findings)

    def _look_again(self) -> None:
        gpus = _gpus_here()
        with self._lock:
            self._gpus = gpus
        findings = self._look()
        with self._lock:
            self._findings = findings


def _gpus_here() -> tuple[GpuFacts, ...]:
    return tuple(GpuFacts(name=gpu.name, memory_nbytes=gpu.memory_nbytes) for gpu in find_gpus())


def _facts(settings: Settings, gpus: tuple[GpuFacts, ...], findings: Sequence[Finding]) -> BoxFacts:
    hardware = measured_hardware(settings)
    if settings.ray_address is not None:  # jobs may run on another machine than this process
        gpus = _gpus_of(hardware)
    ssds, troubles = _ssds(settings)
    return BoxFacts(
        windlass=version("windlass"),
        python=platform.python_version(),
        torch=version("torch"),
        ray=version("ray"),
        num_cores=num_cores(),
        num_gpus=len(gpus),
        cpu_ranks=settings.cpu_ranks,
        gpus=gpus,
        memory_nbytes=psutil.virtual_memory().total,
        num_cpu_optimizers=settings.num_cpu_optimizers,
        host_memory_gib=settings.host_memory_gib,
        gpu_memory_gib=settings.gpu_memory_gib,
        ssds=ssds,
        hardware=None if hardware is None else hardware.model_dump(mode="json"),
        findings=(*troubles, *findings),
        link_host=link_host_of(settings),
    )


def _gpus_of(hardware: Hardware | None) -> tuple[GpuFacts, ...]:
    if hardware is None:
        return ()
    gpu = GpuFacts(name=hardware.gpus.name or "GPU", memory_nbytes=int(hardware.gpus.memory_gib * GIB))
    return (gpu,) * hardware.gpus.count


def _ssds(settings: Settings) -> tuple[tuple[SsdFacts, ...], Sequence[Finding]]:
    rated = settings.ssd_endurance_nbytes or (None,) * len(settings.ssd_dirs)
    written = written_by_ssd(settings)
    ssds, troubles = [], []
    for path, rated_nbytes in zip(settings.ssd_dirs, rated, strict=True):
        total_nbytes = free_nbytes = 0
        try:
            total_nbytes, free_nbytes = _space(path)
        except (OSError, StoreError, ValueError) as error:
            troubles.append(Finding(text=f"SSD {path} cannot be read: {error}", is_problem=True))
        ssds.append(
            SsdFacts(
                path=str(path),
                total_nbytes=total_nbytes,
                free_nbytes=free_nbytes,
                written_nbytes=written.get(str(path)),
                rated_nbytes=rated_nbytes,
            )
        )
    return tuple(ssds), troubles


def _space(path: Path) -> tuple[int, int]:
    """Returns the total and the free bytes of an SSD directory, which need not exist yet, or of a block device."""
    if not is_block_device(path):
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        return directory_nbytes(existing), directory_free_nbytes(existing)
    total_nbytes = device_nbytes(path)
    if not has_volume(path):
        return total_nbytes, total_nbytes
    volume = Volume.open(path, direct=False)
    try:
        return total_nbytes, volume.free_nbytes()
    finally:
        volume.close()
