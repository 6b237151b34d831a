"""Finds the layers of any PyTorch model and lays out their parameters in one flat vector per layer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from windlass.actors.offload.errors import CannotOffloadError, ParamsAwayError
from windlass.storage.ids import BlockIndex, ChunkIndex, ChunkKey

# Elements. Each parameter begins at a multiple of this, because the update kernels need ranges aligned to 8 bytes in
# every format.
_ALIGNMENT_NUMEL = 64

# The functions that are allowed on a parameter whose values are not in memory.
_METADATA = {
    "__get__", "__set__", "__repr__", "__hash__", "detach", "dim", "numel", "nelement", "size", "stride",
    "element_size", "is_floating_point", "is_complex", "requires_grad_", "ndimension", "register_hook",
    "register_post_accumulate_grad_hook", "is_contiguous",
}  # fmt: skip


class OffloadedParameter(nn.Parameter):
    """The stand-in of a layer's parameter while its values are not in memory. It has shape and dtype, but no values."""

    windlass_name: str

    @classmethod
    def of(cls, name: str, param: nn.Parameter) -> "OffloadedParameter":
        """Creates the stand-in of a parameter."""
        meta = torch.empty(param.shape, dtype=param.dtype, device="meta")
        stand_in: OffloadedParameter = torch.Tensor._make_subclass(cls, meta, param.requires_grad)
        stand_in.windlass_name = name
        return stand_in

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allows functions that need only metadata; raises ParamsAwayError for all others."""
        if getattr(func, "__name__", "") not in _METADATA:
            names = [arg.windlass_name for arg in args if isinstance(arg, OffloadedParameter)]
            raise ParamsAwayError(
                f"{', '.join(names) or 'a parameter'} of an offloaded layer was used by "
                f"{getattr(func, '__name__', func)} outside the forward of its layer, where its "
                "values are not in memory; read weights by `model.state_dict()`, clip gradients by `clip_norm` of "
                "`windlass.offload`"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class WrappedParam:
    """One parameter inside its block's flat vector."""

    name: str  # in the model: "model.layers.3.mlp.up_proj.weight"
    shape: tuple[int, ...]
    offset: int  # in elements
    numel: int
    is_trained: bool  # requires grad
    sites: tuple[tuple[nn.Module, str], ...]  # every place in the module tree that holds it
    stand_in: OffloadedParameter

    @property
    def stop(self) -> int:
        """The offset of the end of its values."""
        return self.offset + self.numel

    @property
    def padded_stop(self) -> int:
        """The offset of the next parameter."""
        return self.offset + _padded(self.numel)


@dataclass(frozen=True, slots=True)
class OffloadedBlock:
    """A layer and the layout of its flat vector, all of one dtype."""

    index: BlockIndex
    name: str  # in the model: "model.layers.3"
    layer: nn.Module
    params: tuple[WrappedParam, ...]

    @property
    def numel(self) -> int:
        """The number of elements of the flat vector, with padding."""
        return self.params[-1].padded_stop

    @property
    def is_trained(self) -> bool:
        """True if any parameter requires grad."""
        return any(param.is_trained for param in self.params)

    def paddings(self) -> Iterator[tuple[int, int]]:
        """Yields the paddings after parameters: (offset, number of elements)."""
        for param in self.params:
            if param.padded_stop > param.stop:
                yield param.stop, param.padded_stop - param.stop

    def chunk_keys(self, chunk_numel: int) -> list[ChunkKey]:
        """Returns the keys of the flat vector's chunks, in order."""
        return [ChunkKey(self.index, ChunkIndex(i)) for i in range(-(-self.numel // chunk_numel))]

    def chunk_range(self, key: ChunkKey, chunk_numel: int) -> tuple[int, int]:
        """Returns the index of a chunk's first element, and of the element after its last one."""
        return key.chunk * chunk_numel, min((key.chunk + 1) * chunk_numel, self.numel)

    def install(self, values: Mapping[str, nn.Parameter]) -> None:
        """Puts parameters into the layer's modules. Parameters that `values` lacks get their stand-ins."""
        for param in self.params:
            for module, attribute in param.sites:
                module._parameters[attribute] = values.get(param.name, param.stand_in)


def find_layers(model: nn.Module, layers: str | Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    """Returns the layers with their names, from the containers named by `layers` or the model's only ModuleList.

    Raises:
        CannotOffloadError: there is no such container, or more than one, or the model is compiled or wrapped.
    """
    _refuse_wrappers(model)
    modules = dict(model.named_modules())
    if layers is None:
        names = [_only_list(model)]
    else:
        names = [layers] if isinstance(layers, str) else list(layers)
        for name in names:
            if not isinstance(modules.get(name), nn.ModuleList | nn.Sequential):
                raise CannotOffloadError(f"layers names {name!r}, which is no ModuleList or Sequential of the model")
    found: dict[int, tuple[str, nn.Module]] = {}
    for name in names:
        for child_name, layer in modules[name].named_children():
            if any(True for _ in layer.parameters()):
                found.setdefault(id(layer), (f"{name}.{child_name}", layer))
    if not found:
        raise CannotOffloadError(f"there are no layers with parameters in {', '.join(names)}")
    return list(found.values())


def lay_out(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> list[OffloadedBlock]:
    """Returns the flat layout of every layer. The model is not changed.

    Raises:
        CannotOffloadError: parameters are shared between layers, or with the rest of the model, or differ in dtype.
    """
    owner: dict[int, str] = {}
    blocks: list[OffloadedBlock] = []
    for layer_name, layer in layers:
        sites: dict[int, list[tuple[nn.Module, str]]] = {}
        params: dict[int, tuple[str, nn.Parameter]] = {}
        for module_name, module in layer.named_modules():
            for attribute, param in module._parameters.items():
                if param is not None:
                    name = ".".join(part for part in (layer_name, module_name, attribute) if part)
                    params.setdefault(id(param), (name, param))
                    sites.setdefault(id(param), []).append((module, attribute))
        for key, (name, _) in params.items():
            if key in owner:
                raise CannotOffloadError(
                    f"{name} and {owner[key]} are one parameter, shared between layers; its gradient would be whole "
                    "only after both, which is not supported: give each layer its own"
                )
            owner[key] = name
        blocks.append(_block(BlockIndex(len(blocks)), layer_name, layer, params, sites))
    _refuse_sharing_with_outside(model, layers, owner)
    dtypes = {str(param.stand_in.dtype) for block in blocks for param in block.params}
    if len(dtypes) > 1 or not dtypes <= {"torch.float32", "torch.bfloat16", "torch.float16"}:
        raise CannotOffloadError(
            f"the layers' parameters are {', '.join(sorted(dtypes))}; all must be torch.float32, all "
            "torch.bfloat16, or all torch.float16"
        )
    return blocks


def outside_params(model: nn.Module, blocks: Sequence[OffloadedBlock]) -> dict[str, nn.Parameter]:
    """Returns the parameters that belong to no layer, by name; tied parameters once."""
    inside = {id(module) for block in blocks for module in block.layer.modules()}
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for module_name, module in model.named_modules():
        if id(module) not in inside:
            for attribute, param in module._parameters.items():
                if param is not None:
                    found.setdefault(id(param), (f"{module_name}.{attribute}" if module_name else attribute, param))
    return dict(found.values())


# --- inside ----------------------------------------------------------------------------------------------------------


def _padded(numel: int) -> int:
    return -(-numel // _ALIGNMENT_NUMEL) * _ALIGNMENT_NUMEL


def _block(
    index: BlockIndex,
    name: str,
    layer: nn.Module,
    params: Mapping[int, tuple[str, nn.Parameter]],
    sites: Mapping[int, list[tuple[nn.Module, str]]],
) -> OffloadedBlock:
    placed, offset = [], 0
    for key, (param_name, param) in params.items():
        if param.is_meta:
            raise CannotOffloadError(f"{param_name} is on the meta device; load or initialise the weights first")
        placed.append(
            WrappedParam(
                name=param_name,
                shape=tuple(param.shape),
                offset=offset,
                numel=param.numel(),
                is_trained=param.requires_grad,
                sites=tuple(sites[key]),
                stand_in=OffloadedParameter.of(param_name, param),
            )
        )
        offset += _padded(param.numel())
    return OffloadedBlock(index, name, layer, tuple(placed))


def _refuse_wrappers(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise CannotOffloadError("the model is wrapped for several processes; windlass.offload works in one")
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise CannotOffloadError(
                f"{name or 'the model'} is compiled by torch.compile, which keeps hold of its parameters; offload the "
                "model that was not compiled"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise CannotOffloadError(
                f"gradient checkpointing is on in {name or 'the model'}; turn it off "
                "(`model.gradient_checkpointing_disable()`): windlass computes every layer again by itself"
            )


def _only_list(model: nn.Module) -> str:
    """Returns the name of the only outermost ModuleList with parameters; raises CannotOffloadError otherwise."""
    lists: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            numel = sum(param.numel() for param in module.parameters())
            if numel:
                lists[name] = numel
    if len(lists) == 1:
        return next(iter(lists))
    if not lists:
        raise CannotOffloadError(
            f'{type(model).__name__} holds no ModuleList of layers; name the container of its layers: layers="..."'
        )
    choices = ", ".join(f"{name} ({numel} parameters)" for name, numel in lists.items())
    raise CannotOffloadError(
        f'{type(model).__name__} has several ModuleLists: {choices}; name those to offload: layers=["..."]'
    )


def _refuse_sharing_with_outside(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], owner: Mapping[int, str]
) -> None:
    inside = {id(module) for _, layer in layers for module in layer.modules()}
    for module_name, module in model.named_modules():
        if id(module) in inside:
            continue
        for attribute, param in module._parameters.items():
            if param is not None and id(param) in owner:
                raise CannotOffloadError(
                    f"{module_name}.{attribute} and {owner[id(param)]} are one parameter, shared between a layer and "
                    "the rest of the model, which is not supported: untie them"
                )
