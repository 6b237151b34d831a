"""`windlass.offload`: a plain PyTorch training loop, with its layers' states on SSDs and in host memory.

Source: Ratel, IV-E and Fig. 4, for the few lines that turn a training loop into an offloaded one.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from windlass.actors.offload.engine import OffloadEngine
from windlass.actors.offload.errors import CannotOffloadError, OffloadMisuseError
from windlass.actors.offload.layers import OffloadedBlock, OffloadedParameter, find_layers, lay_out
from windlass.actors.offload.optimizer import OffloadedOptimizer, hyper_of_group, require_adam
from windlass.actors.offload.settings import Hyper, OffloadSettings
from windlass.storage.ids import Kernel, StatePrecision

_Model = TypeVar("_Model", bound=nn.Module)


def offload(
    model: _Model,
    optimizer: torch.optim.Optimizer,
    *,
    ssd_dirs: Sequence[str | Path],
    layers: str | Sequence[str] | None = None,
    device: str | torch.device | None = None,
    clip_norm: float | None = None,
    backwards_per_step: int = 1,
    host_memory_gib: float | None = None,
    state_precision: str = "fp32",
    kernel: str | None = None,
    kernel_dir: str | Path | None = None,
    optimizer_threads: int | None = None,
    arena_dir: str | Path = "/dev/shm",
    direct_io: bool = True,
    deadline_s: float = 600.0,
    chunk_numel: int | None = None,
    poison_released: bool = False,
) -> tuple[_Model, OffloadedOptimizer]:
    """Offloads a model's layers in place; returns the model and the optimizer to train it with.

    The layers' params and optimizer states move to the SSDs, layer by layer. The model must hold its weights, with all
    layers in fp32 or all in bf16. Its other parameters move to `device`, by default to the GPU if there is one.
    `optimizer` must be a new torch.optim.AdamW or Adam; use only the returned optimizer afterwards.

    Args:
        ssd_dirs: directories for the states, one on each SSD.
        layers: name of the ModuleList of layers, or several names; needed if the model has more than one ModuleList.
        clip_norm: largest gradient norm, in place of `clip_grad_norm_`.
        backwards_per_step: number of backward passes before each step. Without `clip_norm`, layers are already updated
            during the last of them.
        host_memory_gib: host memory for buffers. Memory beyond their need holds states of layers.
        state_precision: for bf16 models, "fp32", "split" (the same results in less space), or "bf16".
        kernel: "compiled", "fused", or None for the compiled kernel if there is a compiler.
        direct_io: False for file systems without O_DIRECT.
        deadline_s: timeout of a disk, in seconds.
        poison_released: fills released buffers with NaN, for tests.

    Raises:
        CannotOffloadError: the model or the optimizer cannot be trained with exact results. Nothing was changed.
        PlanError, InsufficientSpaceError: there is too little space; the text gives the bytes needed. Nothing was
            changed.
    """
    if backwards_per_step < 1 or (clip_norm is not None and clip_norm <= 0):
        raise ValueError(f"backwards_per_step {backwards_per_step} and clip_norm {clip_norm} must be positive")
    if not ssd_dirs:
        raise ValueError("ssd_dirs names no directory; the states of layers need one")
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    settings = OffloadSettings(
        ssd_dirs=tuple(Path(directory) for directory in ssd_dirs),
        device=chosen,
        clip_norm=clip_norm,
        backwards_per_step=backwards_per_step,
        host_memory_nbytes=None if host_memory_gib is None else int(host_memory_gib * 2**30),
        state_precision=StatePrecision(state_precision),
        kernel=None if kernel is None else Kernel(kernel),
        kernel_dir=_kernel_dir() if kernel_dir is None else Path(kernel_dir),
        optimizer_threads=optimizer_threads or max(1, len(os.sched_getaffinity(0)) // 2),
        arena_dir=Path(arena_dir),
        direct_io=direct_io,
        deadline_s=deadline_s,
        chunk_numel=chunk_numel,
        poison_released=poison_released,
    )
    require_adam(optimizer, model)
    blocks = lay_out(model, find_layers(model, layers))
    groups = _groups_of(optimizer, blocks)
    if unused := [name for name, p in model.named_parameters() if p.dtype not in (torch.float32, torch.bfloat16)]:
        raise CannotOffloadError(f"{unused[0]} is neither torch.float32 nor torch.bfloat16")

    def hyper_of(name: str) -> Hyper | None:
        group = groups.get(name)
        return None if group is None else hyper_of_group(group)

    stand_ins = _stand_ins(blocks)
    engine = OffloadEngine(model, blocks, settings, hyper_of)
    for group in optimizer.param_groups:
        group["params"] = [stand_ins.get(id(param), param) for param in group["params"]]
    _stream_state_dict(model, blocks, engine)
    return model, OffloadedOptimizer(optimizer, engine)


def _kernel_dir() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "windlass" / "kernels"


def _groups_of(optimizer: torch.optim.Optimizer, blocks: Sequence[OffloadedBlock]) -> dict[str, dict[str, Any]]:
    """Returns the optimizer's parameter group of each parameter of the layers, by name."""
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    groups_by_name = {}
    for param in (param for block in blocks for param in block.params):
        module, attribute = param.sites[0]
        group = groups.get(id(module._parameters[attribute]))
        if group is not None:
            groups_by_name[param.name] = group
    return groups_by_name


def _stand_ins(blocks: Sequence[OffloadedBlock]) -> dict[int, OffloadedParameter]:
    """Returns the stand-in of each parameter of the layers, by the parameter's id.

    The ids stay valid because the optimizer still holds the parameters.
    """
    params = [(param.sites[0], param.stand_in) for block in blocks for param in block.params]
    return {id(module._parameters[attribute]): stand_in for (module, attribute), stand_in in params}


def _stream_state_dict(model: nn.Module, blocks: Sequence[OffloadedBlock], engine: OffloadEngine) -> None:
    """Makes `model.state_dict()` include the layers' weights, read into host memory."""
    names: dict[int, list[str]] = {}  # by stand-in; several if a layer uses a parameter twice
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)

    def fill(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        for block in blocks:
            params = engine.read_params(block)
            for param in block.params:
                for name in names[id(param.stand_in)]:
                    state_dict[prefix + name] = params[param.name]

    def refuse(*_: Any) -> None:
        raise OffloadMisuseError(
            "weights cannot be loaded into an offloaded model; load them before `windlass.offload`"
        )

    model.register_state_dict_post_hook(fill)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
