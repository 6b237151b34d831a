"""`/v1/fine_tuning/machines` and `/v1/fine_tuning/shapes`: the machines and models that plans know by name."""

from collections.abc import Iterator
from functools import cache
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from windlass.planner.hardware import (
    Hardware,
    ModelShape,
    UnknownMachineError,
    desktop_sizes,
    machine_name,
    machine_names,
    machine_of,
    published_shapes,
)
from windlass.planner.profiling import num_params_of
from windlass.service.api import ContextDep, ListOf
from windlass.service.api.schemas import ShapeObject
from windlass.service.installation import Settings
from windlass.service.machine import measured_hardware
from windlass.service.validation import ApiError

_MEASURED = "measured"  # the name of this machine, as for `windlass plan --hardware`

machines_router = APIRouter(prefix="/v1/fine_tuning")


class MachineObject(BaseModel):
    """A machine that plans know by name. `sizes`: usual values of each part of a desktop's name; the first is meant.

    `hardware` is what a request for a plan takes as its `hardware`.
    """

    object: Literal["fine_tuning.machine"] = "fine_tuning.machine"
    id: str
    description: str
    hardware: Hardware
    sizes: dict[str, list[int]] | None = None


@machines_router.get("/machines")
def list_machines(context: ContextDep) -> ListOf[MachineObject]:
    """Lists this machine if it was measured, then desktops in their least size, then published machines."""
    return ListOf(data=list(_machines(context.settings)))


@machines_router.get("/machines/{machine}")
def retrieve_machine(context: ContextDep, machine: str) -> MachineObject:
    """Returns a machine. The name of a desktop may have sizes, such as `rtx4090:gpus=2,ram=128,ssds=2`.

    Upper case, spaces and hyphens make no difference, and `2x RTX 4090` has two GPUs. RAM may have any size, in whole
    GiB, from 16 to 256.
    """
    if machine == _MEASURED and (hardware := measured_hardware(context.settings)) is not None:
        return _shown(machine, hardware)
    try:
        name = machine_name(machine)
    except UnknownMachineError as error:
        raise ApiError(str(error), status=404, param="machine", code="machine_not_found") from None
    return _shown(name, machine_of(name))


@machines_router.get("/shapes")
def list_shapes() -> ListOf[ShapeObject]:
    """Lists the published models that can be planned without their files, each version's by their size."""
    return ListOf(data=list(_shapes()))


@cache
def _shapes() -> tuple[ShapeObject, ...]:
    return tuple(_shape(name, shape) for name, shape in published_shapes().items())


def _shape(name: str, shape: ModelShape) -> ShapeObject:
    num_params = num_params_of(shape)
    return ShapeObject(
        id=name,
        description=f"{num_params / 1e9:.3g} billion parameters, {shape.num_layers} layers of {shape.hidden_size}",
        num_params=num_params,
        max_sequence_length=shape.max_tokens,
        shape=shape,
    )


def _machines(settings: Settings) -> Iterator[MachineObject]:
    if (hardware := measured_hardware(settings)) is not None:
        yield _shown(_MEASURED, hardware)
    for name in machine_names():
        yield _shown(name, machine_of(name))


def _shown(name: str, hardware: Hardware) -> MachineObject:
    sizes = desktop_sizes().get(name.partition(":")[0])
    return MachineObject(id=name, description=_description(hardware), hardware=hardware, sizes=sizes)


def _description(hardware: Hardware) -> str:
    gpus, host, ssds = hardware.gpus, hardware.host, hardware.ssds
    cards = f"{gpus.count} x {gpus.name or 'GPU'} ({gpus.memory_gib:.0f} GiB)" if gpus.count else "no GPU"
    space = ssds.count * ssds.capacity_gib
    drives = f"{ssds.count} {'SSD' if ssds.count == 1 else 'SSDs'} with {space:.0f} GiB"
    return f"{cards}, {host.memory_gib:.0f} GiB of host memory, {drives}"
