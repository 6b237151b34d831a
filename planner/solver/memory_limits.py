"""The memory that a job may use on a machine: each tier, less what others keep, limited by the job's budgets."""

from dataclasses import replace

from windlass.amounts import GIB
from windlass.engine.memory_plan import MemoryTier
from windlass.planner.hardware import Hardware
from windlass.planner.solver.planned_job import Limits

# Host memory of a job's processes beside the arena: Ray, and actors that each import torch.
_PROCESSES_NBYTES = 3 * GIB // 2
# That of each further GPU worker, with its share of the process that serves params to several. Measured on a CPU, so
# without a CUDA context: docs/benchmarks.md.
_FURTHER_WORKER_NBYTES = 3 * GIB // 8
# GPU memory that torch's allocator cannot give out: the driver's, and what the card keeps of its nominal size. It
# leaves 22.5 GiB of a 24 GB card.
DRIVER_NBYTES = 3 * GIB // 2


def processes_nbytes(num_ranks: int) -> int:
    """Returns the host memory that the processes of a job with so many GPU workers take beside the arena."""
    return _PROCESSES_NBYTES + (num_ranks - 1) * _FURTHER_WORKER_NBYTES


def others_nbytes(num_ranks: int, *, is_cpu: bool) -> dict[MemoryTier, int]:
    """Returns the memory of each tier that a job's processes and the GPU's driver take beside what the job allocates.

    `is_cpu`: the device is the CPU, whose memory is the host's.
    """
    return {
        MemoryTier.DEVICE: 0 if is_cpu else DRIVER_NBYTES,
        MemoryTier.HOST: processes_nbytes(num_ranks),
        MemoryTier.SSD: 0,
    }


def limits_of(hardware: Hardware, num_ranks: int = 1) -> Limits:
    """Returns the memory of each tier that is left for a job beside its processes and the GPU's driver."""
    is_cpu = hardware.gpus.count == 0
    others = others_nbytes(num_ranks, is_cpu=is_cpu)
    host = hardware.host.memory_gib * GIB - others[MemoryTier.HOST]
    return Limits(
        device_nbytes=host if is_cpu else hardware.gpus.memory_gib * GIB - others[MemoryTier.DEVICE],
        host_nbytes=host,
        ssd_nbytes=hardware.ssds.count * hardware.ssds.capacity_gib * GIB,
    )


def budgets_of(
    hardware: Hardware, *, num_ranks: int, host_memory_nbytes: int | None, device_memory_nbytes: int | None
) -> Limits:
    """Returns the memory that a job may use: that of the machine, limited by the job's budgets, if it has any."""
    limits = limits_of(hardware, num_ranks)
    return replace(
        limits,
        host_nbytes=min(limits.host_nbytes, host_memory_nbytes or limits.host_nbytes),
        device_nbytes=min(limits.device_nbytes, device_memory_nbytes or limits.device_nbytes),
    )
