"""The settings of `windlass.offload`, and the memory plan that follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.actors.offload.layers import OffloadedBlock
from windlass.engine.memory_plan import ModelSize, Placement, Plan, PlanError, make_plan
from windlass.engine.optimizer import AdamSettings
from windlass.storage.ids import Formats, Kernel, StatePrecision


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """The user's settings, with the meanings in `windlass.offload`."""

    ssd_dirs: tuple[Path, ...]
    device: torch.device
    clip_norm: float | None
    backwards_per_step: int
    host_memory_nbytes: int | None
    state_precision: StatePrecision
    kernel: Kernel | None
    kernel_dir: Path | None
    optimizer_threads: int
    arena_dir: Path
    direct_io: bool
    deadline_s: float
    chunk_numel: int | None
    poison_released: bool


@dataclass(frozen=True, slots=True)
class Hyper:
    """The present update settings of a parameter."""

    settings: AdamSettings
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStatistics:
    """The traffic so far, and the host memory in use."""

    ssd_read_nbytes: int
    ssd_written_nbytes: int
    num_layers_fetched: int  # copies of a layer to the device
    arena_nbytes: int  # host memory for buffers and for resident states
    num_host_layers: int  # layers whose states are resident in host memory


def plan_offload(
    blocks: Sequence[OffloadedBlock], formats: Formats, chunk_numel: int, settings: OffloadSettings
) -> Plan:
    """Plans the buffers and, within the budget, resident states of as many layers as fit, from the first on.

    Raises:
        PlanError: the budget is too small for the buffers.
    """
    itemsizes = formats.itemsizes
    size = ModelSize(
        block_numels=tuple(block.numel for block in blocks),
        chunk_numel=chunk_numel,
        param_itemsize=itemsizes[formats.param_kind],
        state_itemsize=sum(itemsizes.values()),
    )

    def with_host_blocks(num: int) -> Plan:
        return make_plan(
            size,
            num_optimizers=1,
            grad_itemsize=itemsizes[formats.param_kind],
            keep_grads=settings.clip_norm is not None or settings.backwards_per_step > 1,
            host_memory_nbytes=settings.host_memory_nbytes,
            placement=Placement(host_blocks=tuple(range(num)), num_host_grad_blocks=len(blocks), num_cached_params=0),
        )

    plan = with_host_blocks(0)
    if settings.host_memory_nbytes is not None:
        for num in range(1, len(blocks) + 1):
            try:
                plan = with_host_blocks(num)
            except PlanError:
                break
    return plan
