"""Checks before a job writes anything: the speed of its SSDs, and the free space on them and in memory."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from windlass.actors.job.context import JobContext, SsdFacts
from windlass.actors.job.spec import JobSpec
from windlass.storage.ids import JobId
from windlass.storage.integrity import StoreError
from windlass.storage.io import Backend, uring_refusal
from windlass.storage.memory import arena_room_nbytes, require_arena_room
from windlass.storage.ssd import (
    UNIT_NBYTES,
    Calibration,
    Demand,
    Volume,
    calibrate,
    is_block_device,
    is_device_path,
    stripe_weights,
)
from windlass.storage.store import scratch_demand, spaces_in, stored_geometry

_SCRATCH_NBYTES = 128 << 20  # size of the region that a measurement overwrites, if there is space
_MIN_SCRATCH_NBYTES = 16 << 20
_SCRATCH = JobId("calibration")  # owns that region
_MEASURE_DEADLINE_S = 60.0  # seconds to wait for another process that measures the same SSD


def survey_ssds(spec: JobSpec, *, direct: bool = True) -> tuple[SsdFacts, ...]:
    """Returns the settings of each SSD of a job, from its stored measurement or a new one.

    Creates missing SSD directories. A resumed job keeps its first weights, because they determine the places of its
    chunks.
    """
    calibrations: list[Calibration] = []
    weights: tuple[int, ...] | None = None
    measured: dict[int, Calibration] = {}
    for name in spec.ssd_dirs:
        with calibrated(Path(name), measured, direct=direct) as (volume, calibration):
            geometry = stored_geometry(volume, spec.job, spec.layout_epoch)
        calibrations.append(calibration)
        if geometry is not None and geometry.num_ssds == len(spec.ssd_dirs):
            weights = geometry.ssd_weights
    weights = weights or stripe_weights([calibration.mixed_bytes_per_s for calibration in calibrations])
    return tuple(
        SsdFacts(io=calibration.io, weight=weight) for calibration, weight in zip(calibrations, weights, strict=True)
    )


@contextlib.contextmanager
def calibrated(
    path: Path, measured: dict[int, Calibration], *, direct: bool = True
) -> Iterator[tuple[Volume, Calibration]]:
    """Opens an SSD's volume and yields it with its calibration: the stored one or a new one.

    Creates a missing directory. `measured` has the calibrations so far by disk, because two directories may share a
    disk; this one is added.
    """
    if not is_device_path(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    volume = Volume.open(path, direct=direct)
    try:
        disk = disk_of(path)
        measured[disk] = calibration_of(volume, measured.get(disk))
        yield volume, measured[disk]
    finally:
        volume.close()


def calibration_of(volume: Volume, of_same_disk: Calibration | None = None) -> Calibration:
    """Returns a volume's stored calibration or, if it has none, `of_same_disk` or a new measurement.

    The volume then stores it.
    """
    calibration = _known_calibration(volume)
    if calibration is None:
        calibration = of_same_disk or _measure(volume)
        volume.keep_calibration(calibration.to_json())
    return calibration


def arena_free_nbytes(spec: JobSpec) -> int:
    """Returns the bytes of host memory for the arena of a job without a budget.

    A quarter of the free memory is left for the job's processes and other programs.
    """
    return arena_room_nbytes(Path(spec.arena_dir)) // 4 * 3


def require_room(context: JobContext, *, direct: bool = True) -> None:
    """Checks the free space on the SSDs and the free memory for the arena.

    Directories on one disk are checked together. Space that a resumed job already holds counts as available.
    Raises InsufficientSpaceError with the bytes needed and free.
    """
    needed: dict[int, int] = defaultdict(int)
    volumes: dict[int, Volume] = {}
    try:
        for index, name in enumerate(context.spec.ssd_dirs):
            volume = Volume.open(name, direct=direct)
            disk = disk_of(Path(name))
            volumes.setdefault(disk, volume)
            needed[disk] += _missing_nbytes(context, index, volume)
            if volumes[disk] is not volume:
                volume.close()
        for disk, volume in volumes.items():
            volume.require_room("the model states and swapped activations", needed[disk])
    finally:
        for volume in volumes.values():
            volume.close()
    require_arena_room(Path(context.spec.arena_dir), context.plan.arena_nbytes)


def _missing_nbytes(context: JobContext, ssd: int, volume: Volume) -> int:
    """Returns the bytes that the job still has to reserve on an SSD."""
    scratch = scratch_demand(context.plan.activations.slot_nbytes, context.num_reserved_slots(ssd)).nbytes
    held = spaces_in(volume).get(context.spec.job, {}).get(context.spec.layout_epoch)
    if held is None:
        return context.geometry(ssd).demand.nbytes + scratch
    return max(0, scratch - UNIT_NBYTES * sum(part.count for part in held.scratch))


def _known_calibration(volume: Volume) -> Calibration | None:
    """Returns a volume's stored calibration if it is usable.

    It is not if it has another version, or needs io_uring and the machine no longer offers it.
    """
    if (stored := volume.calibration()) is None:
        return None
    try:
        calibration = Calibration.from_json(stored)
    except ValueError:
        return None
    is_usable = calibration.io.backend is not Backend.URING or uring_refusal() is None
    return calibration if is_usable else None


def disk_of(path: Path) -> int:
    """Returns a number that is the same for all SSD directories on one disk."""
    facts = path.stat()
    return facts.st_rdev if is_block_device(path) else facts.st_dev


def _measure(volume: Volume) -> Calibration:
    with measuring(volume):
        if (known := _known_calibration(volume)) is not None:
            return known  # by the process that this one waited for
        with scratch(volume) as (offset, nbytes):
            return calibrate(volume.device, offset, nbytes)


@contextlib.contextmanager
def measuring(volume: Volume) -> Iterator[None]:
    """Claims an SSD for a measurement. Two processes at a time would each measure half of its speed.

    Raises:
        StoreError: another process has held the claim for too long.
    """
    until_s = time.monotonic() + _MEASURE_DEADLINE_S
    while not volume.device.claim():
        if time.monotonic() > until_s:
            raise StoreError(
                f"SSD {volume.path}: another process has been measuring it for {_MEASURE_DEADLINE_S:g} s; end it"
            )
        time.sleep(0.1)
    try:
        yield
    finally:
        volume.device.release()


@contextlib.contextmanager
def scratch(volume: Volume) -> Iterator[tuple[int, int]]:
    """Reserves a region that a measurement may overwrite; yields its offset and size in bytes.

    The caller must hold the claim of `measuring`.
    """
    volume.free(_SCRATCH)  # left by a process that was killed during a measurement
    fits = min(_SCRATCH_NBYTES, volume.free_nbytes() // 2 // UNIT_NBYTES * UNIT_NBYTES)
    nbytes = max(_MIN_SCRATCH_NBYTES, fits)
    allocation = volume.reserve(_SCRATCH, Demand(head_nbytes=nbytes, extent_nbytes=UNIT_NBYTES, num_extents=0))
    try:
        yield allocation.head_offset, nbytes
    finally:
        volume.free(_SCRATCH)
