"""The configuration of `windlass.offload`, and the memory plan that follows from it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

import torch

from windlass.actors.offload.layers import OffloadedBlock
from windlass.engine.device import with_index
from windlass.engine.memory_plan import ModelSize, Placement, Plan, PlanError, make_plan
from windlass.engine.optimizer import AdamSettings
from windlass.storage.ids import Formats, Kernel, StatePrecision

# The settings that must be positive where they are set; the first ones are whole numbers.
_COUNTS = ("backwards_per_step", "optimizer_threads", "chunk_numel")
_POSITIVE = (*_COUNTS, "clip_norm", "host_memory_gib", "deadline_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """The settings of `windlass.offload`.

    Attributes:
        ssd_dirs: directories for the states, one on each SSD.
        layers: name of the ModuleList of layers, or several names; needed if the model has more than one ModuleList.
        device: the device that computes; None: the GPU if there is one.
        clip_norm: largest gradient norm, in place of `clip_grad_norm_`.
        backwards_per_step: number of backward passes before each step. Without `clip_norm`, layers are already updated
            during the last of them.
        host_memory_gib: host memory for buffers. Memory beyond their need holds states of layers.
        state_precision: for bf16 models, "fp32", "split" (the same results in less space), or "bf16".
        kernel: "compiled", "fused", or None for the compiled kernel if there is a compiler.
        kernel_dir: the folder of compiled kernels; None: a folder in the user's cache.
        optimizer_threads: threads of the updates; None: half of the cores.
        arena_dir: the folder of shared memory.
        direct_io: False for file systems without O_DIRECT.
        deadline_s: timeout of a disk, in seconds.
        chunk_numel: elements that are moved at once; None: chosen by the size of the layers.
        poison_released: fills released buffers with NaN, for tests.

    Raises:
        ValueError: a setting has a wrong type or is out of its range.
    """

    ssd_dirs: Sequence[str | Path]
    layers: str | Sequence[str] | None = None
    device: str | torch.device | None = None
    clip_norm: float | None = None
    backwards_per_step: int = 1
    host_memory_gib: float | None = None
    state_precision: str = StatePrecision.FP32
    kernel: str | None = None
    kernel_dir: str | Path | None = None
    optimizer_threads: int | None = None
    arena_dir: str | Path = "/dev/shm"
    direct_io: bool = True
    deadline_s: float = 600.0
    chunk_numel: int | None = None
    poison_released: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.ssd_dirs, str | Path) or not self.ssd_dirs:
            raise ValueError(f"ssd_dirs is {self.ssd_dirs!r}; it must be a list with one directory for each SSD")
        if wrong := [each for each in self.ssd_dirs if not isinstance(each, str | Path)]:
            raise ValueError(f"ssd_dirs names {wrong[0]!r}; it must be a list with one directory for each SSD")
        for name in _POSITIVE:
            value = getattr(self, name)
            is_number = isinstance(value, Integral if name in _COUNTS else Real) and not isinstance(value, bool)
            if value is not None and not is_number:
                raise ValueError(f"{name} is {value!r}; it must be a {'whole ' * (name in _COUNTS)}number")
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}; it must be positive")
        for name, choices in (("state_precision", StatePrecision), ("kernel", Kernel)):
            value = getattr(self, name)
            if value is not None and value not in list(choices):
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")

    @property
    def chosen_device(self) -> torch.device:
        """The device that computes, with its number."""
        return with_index(torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu")))

    @property
    def chosen_kernel_dir(self) -> Path:
        """The folder of compiled kernels."""
        if self.kernel_dir is not None:
            return Path(self.kernel_dir)
        cache = os.environ.get("XDG_CACHE_HOME")
        return (Path(cache) if cache else Path.home() / ".cache") / "windlass" / "kernels"

    @property
    def num_optimizer_threads(self) -> int:
        """The threads of the updates."""
        return self.optimizer_threads or max(1, len(os.sched_getaffinity(0)) // 2)

    @property
    def host_memory_nbytes(self) -> int | None:
        """The budget for host memory; None if there is none."""
        return None if self.host_memory_gib is None else int(self.host_memory_gib * 2**30)


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
    blocks: Sequence[OffloadedBlock], formats: Formats, chunk_numel: int, config: OffloadConfig, *, keep_grads: bool
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
            keep_grads=keep_grads,
            host_memory_nbytes=config.host_memory_nbytes,
            placement=Placement(host_blocks=tuple(range(num)), num_host_grad_blocks=len(blocks), num_cached_params=0),
        )

    plan = with_host_blocks(0)
    if config.host_memory_nbytes is not None:
        for num in range(1, len(blocks) + 1):
            try:
                plan = with_host_blocks(num)
            except PlanError:
                break
    return plan
