"""`windlass.offload`: a plain PyTorch training loop, with its layers' states on SSDs and in host memory.

Source: Ratel, IV-E and Fig. 4: the few lines by which a training loop becomes an offloaded one.
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
    """The same model, its layers' states moved away layer by layer, and the optimizer to train it with.

    The model holds its weights, all layers in fp32 or all in bf16; what lies outside of the layers moves to `device`
    (None: the GPU if there is one). `optimizer` is a new torch.optim.AdamW or Adam, and is not to be used itself again.

    `layers`: the name of the ModuleList, or of several, where it is not the only one. `clip_norm`: in place of
    `clip_grad_norm_`. `backwards_per_step`: so many backwards come before each step; in the last of them layers are
    updated already, unless there is `clip_norm`. `host_memory_gib`: what buffers may take; if more, states of layers
    stay there. `state_precision` (bf16 models): "fp32", "split" (the same in less space), or "bf16". `kernel`:
    "compiled", "fused", or None: compiled if there is a compiler. `direct_io=False`: for file systems without O_DIRECT.
    `deadline_s`: the longest wait for a disk. `poison_released` fills buffers with NaN when they are let go, for tests.

    Raises:
        CannotOffloadError: the model or the optimizer cannot be trained exactly this way; nothing was changed.
        PlanError, InsufficientSpaceError: it does not fit; the text gives the bytes needed. Nothing was changed.
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
    """The parameter group of each parameter of the layers, by name."""
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    found = {}
    for param in (param for block in blocks for param in block.params):
        module, attribute = param.sites[0]
        group = groups.get(id(module._parameters[attribute]))
        if group is not None:
            found[param.name] = group
    return found


def _stand_ins(blocks: Sequence[OffloadedBlock]) -> dict[int, OffloadedParameter]:
    """What will stand for each parameter of the layers, which the optimizer keeps alive until then."""
    params = [(param.sites[0], param.stand_in) for block in blocks for param in block.params]
    return {id(module._parameters[attribute]): stand_in for (module, attribute), stand_in in params}


def _stream_state_dict(model: nn.Module, blocks: Sequence[OffloadedBlock], engine: OffloadEngine) -> None:
    """Lets `model.state_dict()` hold the layers' weights, read from where they rest, in host memory."""
    names: dict[int, list[str]] = {}  # of each stand-in: more than one where a layer uses a parameter twice
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
