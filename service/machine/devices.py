"""Checks a job's GPUs, as early as the process that accepts the job can know them."""

from collections.abc import Collection

from windlass.planner.hardware import Hardware
from windlass.service.installation import Settings, num_cores
from windlass.service.jobs import MachineResources
from windlass.service.machine.doctor import measured_hardware
from windlass.service.machine.fleet import HEAD_NAME, BoxFacts
from windlass.service.validation import ApiError, name_hint
from windlass.storage.sql import Box


def check_box(name: str | None, boxes: Collection[Box]) -> None:
    """Raises ApiError if a job asks for a box that has not joined. `boxes`: those that have."""
    names = [HEAD_NAME, *(box.name for box in boxes)]
    if name is not None and name not in names:
        which = f"the boxes are {', '.join(names)}" if boxes else f"no box has joined, so there is only {HEAD_NAME!r}"
        raise ApiError(
            f"windlass.box: there is no box {name!r}; {which}{name_hint(name, names)}",
            param="windlass.box",
            code="invalid_value",
        )


def check_gpus(
    settings: Settings, gpus: int, *, other: Hardware | None = None, boxes: Collection[Box] = (), box: str | None = None
) -> None:
    """Raises ApiError if no box has the GPUs that a job asks for, all of one model.

    `other`: another machine than that of the jobs. Where only the dispatcher knows the machine, it refuses the job.
    `boxes`: the boxes that have joined. `box`: the one that the job asks for; None: any.
    """
    if gpus == 1:
        return
    joined = {each.name: _why_too_many_there(each, gpus) for each in boxes if box in (None, each.name)}
    if None in joined.values():
        return
    if box in joined:
        raise ApiError(f"on box {box}: {joined[box]}", param="windlass.gpus", code="invalid_value")
    resources = _known_resources(settings) if other is None else _resources_of(other)
    cpu_ranks = settings.cpu_ranks if other is None else None
    if resources is not None and (why := resources.why_too_many(gpus, cpu_ranks=cpu_ranks)) is not None:
        why += "; no other box has them either" if joined else ""
        raise ApiError(why, param="windlass.gpus", code="invalid_value")


def _why_too_many_there(box: Box, gpus: int) -> str | None:
    """Returns why a job cannot have so many GPUs on a box that has joined, or None if it can."""
    facts = BoxFacts.model_validate(box.facts)
    models = tuple(dict.fromkeys(gpu.name for gpu in facts.gpus))
    resources = MachineResources(
        num_cores=facts.num_cores, num_gpus=facts.num_gpus, cpu_ranks=facts.cpu_ranks, gpu_models=models
    )
    return resources.why_too_many(gpus)


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
