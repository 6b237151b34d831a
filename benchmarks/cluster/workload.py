"""Boxes of different sizes, and jobs that come at random."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GIB = 1 << 30
# Devices, host memory in GiB, space on SSDs in GiB, and speed of one device relative to the slowest, in the order in
# which the boxes joined.
_BOXES = (
    (4, 256, 4000, 2.0),
    (1, 32, 500, 1.0),
    (8, 512, 8000, 3.0),
    (2, 128, 2000, 2.0),
    (1, 64, 1000, 1.5),
    (8, 512, 4000, 1.5),
    (4, 256, 2000, 1.0),
    (2, 128, 1000, 1.0),
)
# GPUs of a job, with its weight among all.
_GPUS = {1: 0.7, 2: 0.15, 4: 0.1, 8: 0.05}
_MEDIAN_S = 1800.0  # run time on one of the slowest devices
_SPREAD = 1.0  # standard deviation of its logarithm
_ERROR = 0.2  # the same of the real time relative to the predicted one


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBox:
    """A box."""

    name: str
    num_devices: int
    memory_gib: int
    ssd_gib: int
    speed: float

    def fits(self, job: "SimulatedJob") -> bool:
        """Returns whether the box, without other jobs, has what the job needs."""
        return job.gpus <= self.num_devices and job.memory_gib <= self.memory_gib and job.ssd_gib <= self.ssd_gib

    def run_s(self, job: "SimulatedJob") -> float:
        """Returns the predicted run time of a job."""
        return job.work_s / (job.gpus * self.speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """A job."""

    id: str
    owner: str
    priority: int
    arrives_s: float
    gpus: int
    memory_gib: int
    ssd_gib: int
    work_s: float  # on one device of speed 1
    error: float  # real run time / predicted run time


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Boxes, and jobs in the order in which they come."""

    boxes: Sequence[SimulatedBox]
    jobs: Sequence[SimulatedJob]

    @property
    def by_name(self) -> Mapping[str, SimulatedBox]:
        """The boxes by name."""
        return {box.name: box for box in self.boxes}


def make_workload(*, num_jobs: int, num_boxes: int, load: float, seed: int) -> Workload:
    """Makes a workload. `load`: work that comes per second, relative to what all devices can do."""
    rng = random.Random(seed)
    rows = _BOXES[:num_boxes]
    boxes = [
        SimulatedBox(name=f"box{number}", num_devices=devices, memory_gib=memory, ssd_gib=ssd, speed=speed)
        for number, (devices, memory, ssd, speed) in enumerate(rows, start=1)
    ]
    per_s = load * sum(box.num_devices * box.speed for box in boxes)
    jobs, now_s = list[SimulatedJob](), 0.0
    for number in range(num_jobs):
        gpus = rng.choices(list(_GPUS), weights=list(_GPUS.values()))[0]
        work_s = _MEDIAN_S * gpus * math.exp(rng.gauss(0, _SPREAD))
        jobs.append(
            SimulatedJob(
                id=f"job{number}",
                owner=f"user{rng.randrange(6)}",
                priority=rng.choices((0, 1, -1), weights=(0.8, 0.1, 0.1))[0],
                arrives_s=now_s,
                gpus=gpus,
                memory_gib=min(rng.choice((8, 16, 24, 32, 48, 64)) * gpus, 256),
                ssd_gib=rng.choice((50, 100, 200, 400)) * gpus,
                work_s=work_s,
                error=math.exp(rng.gauss(0, _ERROR)),
            )
        )
        now_s += rng.expovariate(1.0) * work_s / per_s
    return Workload(boxes=boxes, jobs=jobs)
