"""The rates of a machine's resources, as the planner uses them."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from windlass.amounts import GB
from windlass.storage.ids import Precision

if TYPE_CHECKING:  # `windlass.planner.hardware.hardware` needs pydantic, which the GPU check does without
    from windlass.planner.hardware import Hardware

# A GPU's memory bandwidth in bytes/s divided by its FLOP/s, for profiles that lack the bandwidth. It is between an RTX
# 4090's (1008 GB/s, 165 TFLOPS) and an A100's (1555 GB/s, 312 TFLOPS).
_MEMORY_BYTES_PER_FLOP = 1 / 180
# An SSD server's CPU time per byte, divided by that of the transfer and checksum alone. Its queues and other memory
# traffic take the difference.
_SSD_SERVER_CPU_FACTOR = 1.75
# If the device is the CPU: compute time lost to copies and updates, divided by the time that they take alone. It is
# more than 1 because caches and memory are shared, and all cores wait for the one that does other work.
_CPU_CONTENTION_FACTOR = 2.1
# The rate of attention on a CPU, divided by that of large matrix products in fp32. Its kernel computes in fp32 with any
# precision. This and the other constants for CPUs: see decision 61.
_CPU_ATTENTION_SHARE = 0.7
# Seconds of one thread for the call of an operator on a CPU, whatever its size.
_CPU_OPERATOR_S = 20e-6
# Bytes that an update on the device reads and writes per parameter: master and moments in and out, gradient in.
_UPDATE_NBYTES = 26
# Bytes to derive a 16-bit param from its master.
_ROUND_NBYTES = 6
# Bytes to add an element of a lane's sum to the total of the lanes before: both are read, the total is written.
_ADD_LANE_NBYTES = 12
# Bytes to add the square of an element to sums in fp64: the element is read, the sum is read and written. This is an
# upper bound, because the sums stay in the caches of a CPU and of a large GPU.
_ADD_SQUARE_NBYTES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The rates of one GPU and of the machine around it, in bytes and params per second."""

    device_flops: float
    device_memory_bytes: float  # read or written by computations on the device
    device_params: float  # updated on the device
    h2d_bytes: float
    d2h_bytes: float
    ssd_read_bytes: float  # of each SSD, which does one transfer at a time
    ssd_write_bytes: float
    num_ssds: int
    optimizer_params: float  # of all CPU optimizers together
    # Read and written in the host's memory by all GPUs' copies, SSD transfers and updates. On a CPU, where computations
    # use the same memory, `shares_cores` includes it.
    host_memory_bytes: float = math.inf
    duplex_bytes: float = math.inf  # of the link, both directions at once
    ssd_cpu_s_per_byte: float = 0.0  # core-seconds per byte moved to or from an SSD
    # The device is the CPU: compute, the optimizer and copies share its cores, and its memory is the host's.
    shares_cores: bool = False
    # What matters on a CPU only: the rate of attention divided by `device_flops`, and the time of each operator's call.
    attention_share: float = 1.0
    operator_s: float = 0.0

    @property
    def device_rounded_params(self) -> float:
        """The number of 16-bit params per second that the device derives from their masters."""
        return self.device_memory_bytes / _ROUND_NBYTES

    @property
    def device_added_params(self) -> float:
        """The number of elements per second of a lane's gradient that the device adds to the total."""
        return self.device_memory_bytes / _ADD_LANE_NBYTES

    @property
    def device_squared_params(self) -> float:
        """The number of elements per second that the device adds to the norm of several lanes' total."""
        return self.device_memory_bytes / _ADD_SQUARE_NBYTES

    def with_slower_cpu(self, factor: float) -> "Speeds":
        """Returns the rates of a machine whose device is the CPU, for cores and memory so much slower; not its SSDs."""
        assert self.shares_cores, "the device is the CPU"
        return replace(
            self,
            device_flops=self.device_flops / factor,
            device_memory_bytes=self.device_memory_bytes / factor,
            device_params=self.device_params / factor,
            h2d_bytes=self.h2d_bytes / factor,
            d2h_bytes=self.d2h_bytes / factor,
            duplex_bytes=self.duplex_bytes / factor,
            optimizer_params=self.optimizer_params / factor,
            host_memory_bytes=self.host_memory_bytes / factor,
            ssd_cpu_s_per_byte=self.ssd_cpu_s_per_byte * factor,
            operator_s=self.operator_s * factor,
        )

    @property
    def duplex_share(self) -> float:
        """The share of its rate that each direction of the link keeps while both are busy.

        It is 1 if the directions are independent, and 1/2 if they take turns.
        """
        return min(1.0, max(0.5, self.duplex_bytes / (self.h2d_bytes + self.d2h_bytes)))

    @property
    def read_bytes(self) -> float:
        """The read rate of all SSDs together."""
        return self.ssd_read_bytes * self.num_ssds

    @property
    def write_bytes(self) -> float:
        """The write rate of all SSDs together."""
        return self.ssd_write_bytes * self.num_ssds


def speeds_of(hardware: "Hardware", num_ranks: int = 1, precision: Precision | None = None) -> Speeds:
    """Returns the rates of a machine for a job with `num_ranks` GPUs.

    If the SSDs have a combined limit, each one gets at most its share of it. So does each GPU of the job that may be
    behind the same PCIe uplink as others. `precision`: of the job; None: that of the profile. It counts where the rate
    in fp32 is known.
    """
    ssds, gpus = hardware.ssds, hardware.gpus
    share = float("inf") if ssds.combined_gb_per_s is None else ssds.combined_gb_per_s / ssds.count
    is_cpu = gpus.count == 0
    fp32_flops = (gpus.fp32_tflops or gpus.tflops) * 1e12
    flops = fp32_flops if precision is Precision.FP32 else gpus.tflops * 1e12
    memory = hardware.host.memory_gb_per_s * GB if is_cpu else gpus.tflops * 1e12 * _MEMORY_BYTES_PER_FLOP
    slower = _CPU_CONTENTION_FACTOR if is_cpu else 1.0
    link = slower * _num_sharing(hardware, num_ranks)
    duplex = hardware.pcie.duplex_gb_per_s
    return Speeds(
        device_flops=flops,
        device_memory_bytes=memory,
        device_params=hardware.host.adam_params_per_s if is_cpu else memory / _UPDATE_NBYTES,
        h2d_bytes=hardware.pcie.h2d_gb_per_s * GB / link,
        d2h_bytes=hardware.pcie.d2h_gb_per_s * GB / link,
        ssd_read_bytes=min(ssds.read_gb_per_s, share) * GB,
        ssd_write_bytes=min(ssds.write_gb_per_s, share) * GB,
        num_ssds=ssds.count,
        ssd_cpu_s_per_byte=_SSD_SERVER_CPU_FACTOR * (ssds.cpu_s_per_gb or 0.0) / GB,
        optimizer_params=hardware.host.adam_params_per_s / slower,
        host_memory_bytes=math.inf if is_cpu else hardware.host.memory_gb_per_s * GB,
        duplex_bytes=math.inf if duplex is None else duplex * GB / _num_sharing(hardware, num_ranks),
        shares_cores=is_cpu,
        attention_share=min(1.0, _CPU_ATTENTION_SHARE * fp32_flops / flops) if is_cpu else 1.0,
        operator_s=_CPU_OPERATOR_S if is_cpu else 0.0,
    )


def _num_sharing(hardware: "Hardware", num_ranks: int) -> int:
    """Returns the number of a job's GPUs that may be behind one PCIe uplink."""
    if hardware.pcie.uplinks is None:
        return 1
    return max(1, min(num_ranks, -(-hardware.gpus.count // hardware.pcie.uplinks)))
