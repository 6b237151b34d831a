"""What each resource of a machine does a second, as the planner counts with it."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.amounts import GB

if TYPE_CHECKING:  # `windlass.planner.hardware.hardware` needs pydantic, which the GPU check does without
    from windlass.planner.hardware import Hardware

# A GPU's memory in bytes a second over its FLOP a second, where a profile does not say: between an RTX 4090's 1008 GB/s
# beside 165 TFLOPS and an A100's 1555 beside 312.
_MEMORY_BYTES_PER_FLOP = 1 / 180
# What a server spends on a byte, over what moving it and its checksum alone take: pieces go through its queues, and
# others use the memory meanwhile. Measured in three jobs: 0.12 to 0.13 s of a core for each GB, where 0.07 were found.
_SERVER_OVER_ALONE = 1.75
# Where the device is the CPU: what copies and updates take of the compute's time, over what they take alone: caches and
# memory are shared, and all cores wait for the one that was taken. Measured in a job (of `benchmarks.planner`, with
# little device memory): 0.36 s of a step where 0.17 were found; of these 0.22 were the cores' own time.
_BESIDE_COMPUTE = 2.1
# What an update on the device reads and writes of a parameter: master and moments in and out, gradient in.
_UPDATE_NBYTES = 26
# ... and to make a 16-bit param of its master.
_ROUND_NBYTES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Bytes and params a second, of one GPU and of the box around it."""

    device_flops: float
    device_memory_bytes: float  # read or written by what is computed there
    device_params: float  # updated there
    h2d_bytes: float
    d2h_bytes: float
    ssd_read_bytes: float  # of each SSD, which does one thing at a time
    ssd_write_bytes: float
    num_ssds: int
    optimizer_params: float  # of all CPU optimizers together
    duplex_bytes: float = math.inf  # of the link, both ways at once
    ssd_cpu_s_per_byte: float = 0.0  # that a core spends on what is moved to an SSD or from it
    # The device is the CPU: what it computes, the optimizer and the copies have the same cores, and its memory is the
    # host's.
    shares_cores: bool = False

    @property
    def device_rounded_params(self) -> float:
        """16-bit params made of their master on the device."""
        return self.device_memory_bytes / _ROUND_NBYTES

    @property
    def duplex_share(self) -> float:
        """Of its rate that each way of the link has while both are busy: 1 where none slows the other down, 1/2 where
        they take turns.
        """
        return min(1.0, max(0.5, self.duplex_bytes / (self.h2d_bytes + self.d2h_bytes)))

    @property
    def read_bytes(self) -> float:
        """Of all SSDs together."""
        return self.ssd_read_bytes * self.num_ssds

    @property
    def write_bytes(self) -> float:
        """Of all SSDs together."""
        return self.ssd_write_bytes * self.num_ssds


def speeds_of(hardware: "Hardware") -> Speeds:
    """Of a machine. Where SSDs have a limit together, none of them is faster than its share."""
    ssds, flops = hardware.ssds, hardware.gpus.tflops * 1e12
    share = float("inf") if ssds.combined_gb_per_s is None else ssds.combined_gb_per_s / ssds.count
    is_cpu = hardware.gpus.count == 0
    memory = hardware.host.memory_gb_per_s * GB if is_cpu else flops * _MEMORY_BYTES_PER_FLOP
    slower = _BESIDE_COMPUTE if is_cpu else 1.0
    return Speeds(
        device_flops=flops,
        device_memory_bytes=memory,
        device_params=hardware.host.adam_params_per_s if is_cpu else memory / _UPDATE_NBYTES,
        h2d_bytes=hardware.pcie.h2d_gb_per_s * GB / slower,
        d2h_bytes=hardware.pcie.d2h_gb_per_s * GB / slower,
        ssd_read_bytes=min(ssds.read_gb_per_s, share) * GB,
        ssd_write_bytes=min(ssds.write_gb_per_s, share) * GB,
        num_ssds=ssds.count,
        ssd_cpu_s_per_byte=_SERVER_OVER_ALONE * (ssds.cpu_s_per_gb or 0.0) / GB,
        optimizer_params=hardware.host.adam_params_per_s / slower,
        duplex_bytes=math.inf if hardware.pcie.duplex_gb_per_s is None else hardware.pcie.duplex_gb_per_s * GB,
        shares_cores=is_cpu,
    )
