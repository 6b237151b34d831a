"""`windlass.offload`: a plain PyTorch training loop, with its layers' states on SSDs and in host memory.

Source: Ratel, IV-E and Fig. 4, for the few lines that turn a training loop into an offloaded one.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from windlass.actors.offload.config import Hyper, OffloadConfig
from windlass.actors.offload.engine import OffloadEngine
from windlass.actors.offload.errors import CannotOffloadError, OffloadMisuseError
from windlass.actors.offload.layers import OffloadedBlock, OffloadedParameter, find_layers, lay_out
from windlass.actors.offload.optimizer import OffloadedOptimizer, hyper_of_group, require_adam
from windlass.engine.device import TORCH_DTYPE

_Model = TypeVar("_Model", bound=nn.Module)

# Environment variables in which launchers give the number of ranks: torchrun and its relatives, and Open MPI.
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")


def offload(
    model: _Model, optimizer: torch.optim.Optimizer, config: OffloadConfig | None = None, **settings: Any
) -> tuple[_Model, OffloadedOptimizer]:
    """Offloads a model's layers in place; returns the model and the optimizer to train it with.

    The layers' params and optimizer states move to the SSDs, layer by layer. The model must hold its weights, with all
    layers in fp32, in bf16 or in fp16. Its other parameters move to the device that computes. `optimizer` must be a new
    torch.optim.AdamW or Adam; use only the returned optimizer afterwards.

    Args:
        model: the model, in the only process that trains it.
        optimizer: the optimizer of its parameters.
        config: the settings. Without it, `settings` are those of a new `OffloadConfig`.

    Raises:
        CannotOffloadError: the model or the optimizer cannot be trained with exact results, or a directory cannot be
            used. Nothing was changed.
        PlanError, InsufficientSpaceError: there is too little space; the text gives the bytes needed. Nothing was
            changed.
        ValueError: a setting has a wrong type or is out of its range.
    """
    if config is None:
        config = OffloadConfig(**settings)
    elif settings:
        raise TypeError(f"{', '.join(settings)}: a setting stands either in the config or by itself; change the config")
    _refuse_ranks()
    require_adam(optimizer, model)
    blocks = lay_out(model, find_layers(model, config.layers))
    groups = _groups_of(optimizer, blocks)
    for name, param in model.named_parameters():
        if param.dtype not in TORCH_DTYPE.values():
            raise CannotOffloadError(f"{name} is {param.dtype}, which is none of fp32, bf16 and fp16")

    def hyper_of(name: str) -> Hyper | None:
        group = groups.get(name)
        return None if group is None else hyper_of_group(group)

    stand_ins = _stand_ins(blocks)
    engine = OffloadEngine(model, blocks, config, hyper_of)
    for group in optimizer.param_groups:
        group["params"] = [stand_ins.get(id(param), param) for param in group["params"]]
    _stream_state_dict(model, blocks, engine)
    return model, OffloadedOptimizer(optimizer, engine)


def _refuse_ranks() -> None:
    """Raises CannotOffloadError if this process is one of several ranks."""
    found = {name: int(value) for name in _WORLD_SIZES if (value := os.environ.get(name, "")).isdecimal()}
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found["torch.distributed"] = torch.distributed.get_world_size()
    for source, world_size in found.items():
        if world_size > 1:
            raise CannotOffloadError(
                f"this process is one of {world_size} ranks ({source}); windlass.offload trains in one process on one "
                "device. Start the program once, without torchrun or another launcher"
            )


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
