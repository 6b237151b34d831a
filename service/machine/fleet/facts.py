"""The parts of a box, as it describes them itself."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from windlass.service.installation import is_one_address
from windlass.service.jobs import MachineResources


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer box may say more


class GpuFacts(_Facts):
    """A GPU as the driver describes it."""

    name: str
    memory_nbytes: int


class SsdFacts(_Facts):
    """One of a box's SSD directories or block devices."""

    path: str
    total_nbytes: int
    free_nbytes: int
    written_nbytes: int | None = None  # by windlass, since the volume was made; None: not known
    rated_nbytes: float | None = None  # what its maker says that it may take; None: not set


class Finding(_Facts):
    """Something that `windlass doctor` says about the box."""

    text: str
    is_problem: bool


def _one_address(host: str) -> str:
    if not is_one_address(host):
        raise ValueError("must be one IP address")
    return host


class BoxFacts(_Facts):
    """The parts of a box. They are sent when it joins, and again when something has changed."""

    windlass: str  # the version
    python: str
    torch: str
    ray: str
    num_cores: int
    num_gpus: int
    cpu_ranks: int = 1
    gpus: tuple[GpuFacts, ...] = ()
    memory_nbytes: int
    # The settings of its home that plans follow from.
    num_cpu_optimizers: int = 1
    host_memory_gib: float | None = None
    gpu_memory_gib: float | None = None
    ssds: tuple[SsdFacts, ...] = ()
    hardware: dict[str, Any] | None = None  # the measured profile; None: not measured yet
    findings: tuple[Finding, ...] = ()
    link_host: Annotated[str, AfterValidator(_one_address)] | None = None  # see `link_host_of`; None: not known yet
    link_bytes_per_s: float | None = None  # measured between box and head; None: not measured yet


def resources_of_box(facts: BoxFacts) -> MachineResources:
    """Returns the cores and GPUs of a box."""
    return MachineResources(
        num_cores=facts.num_cores,
        num_gpus=facts.num_gpus,
        cpu_ranks=facts.cpu_ranks,
        gpu_models=tuple(dict.fromkeys(gpu.name for gpu in facts.gpus)),
    )
