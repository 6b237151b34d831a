"""Checks a job's GPUs, as early as the process that accepts the job can know them."""

from windlass.planner.hardware import Hardware
from windlass.service.installation import Settings, num_cores
from windlass.service.jobs import MachineResources
from windlass.service.machine.doctor import measured_hardware
from windlass.service.validation import ApiError


def check_gpus(settings: Settings, gpus: int, *, other: Hardware | None = None) -> None:
    """Raises ApiError if the machine has fewer GPUs than a job asks for, or several and of different models.

    `other`: another machine than that of the jobs. Where only the dispatcher knows the machine, it refuses the job.
    """
    if gpus == 1:
        return
    resources = _known_resources(settings) if other is None else _resources_of(other)
    cpu_ranks = settings.cpu_ranks if other is None else None
    if resources is not None and (why := resources.why_too_many(gpus, cpu_ranks=cpu_ranks)) is not None:
        raise ApiError(why, param="windlass.gpus", code="invalid_value")


def _known_resources(settings: Settings) -> MachineResources | None:
    """Returns the resources of the machine of this home's jobs; None if only its dispatcher knows them.

    With `ray_address` the API may run elsewhere, such as in a container without GPUs.
    """
    if settings.ray_address is None:
        return MachineResources.here(settings)
    hardware = measured_hardware(settings)
    return None if hardware is None else _resources_of(hardware, cpu_ranks=settings.cpu_ranks)


def _resources_of(hardware: Hardware, *, cpu_ranks: int = 1) -> MachineResources:
    return MachineResources(num_cores=num_cores(), num_gpus=hardware.gpus.count, cpu_ranks=cpu_ranks)
