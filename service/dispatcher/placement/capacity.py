"""The capacity of this machine, its parts in use by jobs, and the demand of a job by its plan."""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.actors.job import disk_of
from windlass.amounts import GIB
from windlass.planner.question import JobPlan, fewest_of_fastest
from windlass.service.dispatcher.placement.queue_policy import Amounts
from windlass.service.installation import Settings
from windlass.service.jobs import ARENA_DIR, MachineResources
from windlass.service.machine import measured_hardware
from windlass.storage.integrity import StoreError
from windlass.storage.memory import arena_room_nbytes, arenas_in, directory_free_nbytes
from windlass.storage.ssd import (
    UNIT_NBYTES,
    Calibration,
    Volume,
    device_nbytes,
    has_volume,
    is_block_device,
    stripe_weights,
)
from windlass.storage.store import spaces_in

_LOG = logging.getLogger(__name__)

# Names of resources. Each disk's name is its path.
DEVICES = "devices"
HOST_MEMORY = "host memory"  # as plans count it, of the measured memory
BUFFERS = "buffers"  # in shared memory, of the memory that is free now


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The resources that a job takes by its plan. An unknown amount is 0."""

    num_devices: int = 1
    host_nbytes: int = 0  # buffers and processes, and the devices' memory if they are the CPU
    buffers_nbytes: int = 0
    ssd_nbytes: int = 0  # on all SSDs together


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdSpace:
    """The space on one entry of `ssd_dirs`."""

    disk: str  # equal for entries on the same disk
    free_nbytes: int
    rate: float | None = None  # measured bytes per second
    held: Mapping[str, int] = field(default_factory=dict)  # bytes by job


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCapacity:
    """The capacity of this machine at one moment."""

    host_nbytes: int | None = None  # measured without any job; None: not measured
    room_nbytes: int  # bytes for buffers in shared memory
    # bytes of existing buffers, or of those being made, by job
    buffers: Mapping[str, int] = field(default_factory=dict)
    ssds: Sequence[SsdSpace] = ()  # empty if one of them cannot be read

    def has(self, resources: MachineResources, holders: Collection[str]) -> Amounts:
        """Returns the total of each resource: the free amount and the amounts of the jobs `holders`."""
        totals = {DEVICES: resources.num_devices, BUFFERS: self.room_nbytes}
        totals[BUFFERS] += sum(self.buffers.get(job_id, 0) for job_id in holders)
        if self.host_nbytes is not None:
            totals[HOST_MEMORY] = self.host_nbytes
        for ssd in self.ssds:  # several entries may share a disk, whose free space counts once
            totals[ssd.disk] = ssd.free_nbytes
        for ssd in self.ssds:
            totals[ssd.disk] += sum(ssd.held.get(job_id, 0) for job_id in holders)
        return totals

    def takes(self, job_id: str, demand: Demand) -> Amounts:
        """Returns the amounts of a job that holds resources or is about to acquire them."""
        buffers = max(self.buffers.get(job_id, 0), demand.buffers_nbytes)
        return {**_memory(demand, buffers), **self._disks(demand, job_id, of_its_own=True)}

    def keeps(self, job_id: str, demand: Demand) -> Amounts:
        """Returns the amounts that a job keeps while it is paused."""
        return self._disks(demand, job_id, of_its_own=True)

    def needs(self, job_id: str, demand: Demand) -> Amounts:
        """Returns the amounts that a waiting job still needs. They exclude its states that already lie on an SSD."""
        return {**_memory(demand, demand.buffers_nbytes), **self._disks(demand, job_id, of_its_own=False)}

    def states_nbytes(self) -> int | None:
        """Returns the most bytes of a new job's states that the SSDs have room for; None: they cannot be read."""
        free = {ssd.disk: ssd.free_nbytes for ssd in self.ssds}
        shares = defaultdict[str, float](float)
        for ssd, share in zip(self.ssds, self._shares(), strict=True):
            shares[ssd.disk] += share
        return min((int(free[disk] / share) for disk, share in shares.items()), default=None)

    def _disks(self, demand: Demand, job_id: str, *, of_its_own: bool) -> Amounts:
        amounts: defaultdict[str, int] = defaultdict(int)
        for ssd, share in zip(self.ssds, self._shares(), strict=True):
            if (held := ssd.held.get(job_id, 0)) > 0:
                amounts[ssd.disk] += held if of_its_own else 0
            else:
                amounts[ssd.disk] += int(demand.ssd_nbytes * share)
        return amounts

    def _shares(self) -> Sequence[float]:
        rates = [ssd.rate for ssd in self.ssds if ssd.rate is not None]
        weights = stripe_weights(rates) if len(rates) == len(self.ssds) > 0 else (1,) * len(self.ssds)
        return [weight / sum(weights) for weight in weights]


def demand_of(plan: JobPlan | None, *, num_devices: int = 1, budget_nbytes: int | None, is_cpu: bool) -> Demand:
    """Returns the demand of a plan. Without a plan, it is the job's budget of buffers, if it has one."""
    if plan is None:
        return Demand(num_devices=num_devices, buffers_nbytes=budget_nbytes or 0)
    return demand_by(plan.report.peak_gib or {}, plan.arena_nbytes, num_devices=num_devices, is_cpu=is_cpu)


def demand_by(peak_gib: Mapping[str, float], arena_nbytes: int | None, *, num_devices: int, is_cpu: bool) -> Demand:
    """Returns the demand of a plan with these numbers."""
    peaks = {name: int(gib * GIB) for name, gib in peak_gib.items()}
    return Demand(
        num_devices=num_devices,
        host_nbytes=peaks.get("host", 0) + (num_devices * peaks.get("gpu", 0) if is_cpu else 0),
        buffers_nbytes=arena_nbytes or 0,
        ssd_nbytes=peaks.get("ssd", 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDemands:
    """The demands of a job by its plan: one, or one for each number of GPUs if the plan chose the number."""

    demands: Mapping[int, Demand]  # by number of GPUs
    step_s: Mapping[int, float] = field(default_factory=dict)  # predicted, by number; empty if the number is fixed
    preferred: int = 1

    def of(self, gpus: int) -> Demand:
        """Returns the demand with this number of GPUs, or with the preferred one if there is no plan for it."""
        return self.demands.get(gpus, self.demands[self.preferred])


def demands_of(
    plan: JobPlan | None, *, num_devices: int, chooses: bool, budget_nbytes: int | None, is_cpu: bool
) -> PlannedDemands:
    """Returns the demands of a job. `chooses`: its plan chooses the number of GPUs; else it has `num_devices`."""
    if plan is None or not chooses or not (step_s := plan.step_s_by_gpus):
        demand = demand_of(plan, num_devices=num_devices, budget_nbytes=budget_nbytes, is_cpu=is_cpu)
        return PlannedDemands(demands={num_devices: demand}, preferred=num_devices)
    demands = {
        number: demand_of(plan.for_gpus(number), num_devices=number, budget_nbytes=budget_nbytes, is_cpu=is_cpu)
        for number in step_s
    }
    return PlannedDemands(demands=demands, step_s=step_s, preferred=fewest_of_fastest(step_s))


def read_capacity(settings: Settings) -> MachineCapacity:
    """Reads this machine's current capacity."""
    hardware = measured_hardware(settings)
    return MachineCapacity(
        host_nbytes=None if hardware is None else int(hardware.host.memory_gib * GIB),
        room_nbytes=arena_room_nbytes(ARENA_DIR),
        buffers={str(job): nbytes for job, nbytes in arenas_in(ARENA_DIR).items()},
        ssds=_ssds(settings.ssd_dirs),
    )


def _ssds(paths: Sequence[Path]) -> Sequence[SsdSpace]:
    names: dict[int, str] = {}
    spaces = []
    for path in paths:
        try:
            spaces.append(_ssd(path, names.setdefault(disk_of(path), str(path))))
        except (OSError, StoreError, ValueError) as error:  # the job's runner reports it
            _LOG.debug("SSD %s cannot be read: %s", path, error)
            return ()
    return spaces


def _ssd(path: Path, disk: str) -> SsdSpace:
    if not has_volume(path):
        free_nbytes = device_nbytes(path) if is_block_device(path) else directory_free_nbytes(path)
        return SsdSpace(disk=disk, free_nbytes=free_nbytes)
    # No states are read or written here, so O_DIRECT is not needed.
    volume = Volume.open(path, direct=False)
    try:
        held = {
            str(job): UNIT_NBYTES * sum(part.count for space in spaces.values() for part in space.taken)
            for job, spaces in spaces_in(volume).items()
        }
        # In a file, the space of a killed process is not reclaimed, because reading the free space must not change the
        # volume.
        free_nbytes = volume.free_nbytes() if is_block_device(path) else directory_free_nbytes(path)
        return SsdSpace(disk=disk, free_nbytes=free_nbytes, rate=_rate(volume), held=held)
    finally:
        volume.close()


def _rate(volume: Volume) -> float | None:
    if (calibration := volume.calibration()) is None:
        return None
    try:
        return Calibration.from_json(calibration).mixed_bytes_per_s
    except ValueError:
        return None


def _memory(demand: Demand, buffers_nbytes: int) -> Amounts:
    return {DEVICES: demand.num_devices, HOST_MEMORY: demand.host_nbytes, BUFFERS: buffers_nbytes}
