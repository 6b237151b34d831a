"""Partitions a Hugging Face causal LM into blocks without loading its weights.

The model is built with its parameters on the meta device. One run of its own `forward`, with stand-ins for the layers,
is traced. It shows the modules before the first layer (the embedding block) and after the last one (the head block).
Models that change the hidden state between layers, or that cannot be trained exactly in this way, are refused.
"""

import contextlib
import inspect
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from windlass.engine.device import TORCH_DTYPE
from windlass.engine.model.layout import (
    BlockLayout,
    ModelLayout,
    ParamSlice,
    UnsupportedArchitectureError,
    choose_chunk_numel,
)
from windlass.storage.ids import BlockIndex, Precision
from windlass.storage.memory import is_out_of_memory

# Held while PyTorch and transformers are patched to build a model. A second thread would make a patch permanent.
_building = threading.Lock()


@dataclass(frozen=True, slots=True)
class ParamSite:
    """A place in the module tree where a parameter must be put before its block runs."""

    module: nn.Module
    attribute: str
    param: ParamSlice
    block: BlockIndex  # the block whose flat vector holds it
    placeholder: nn.Parameter  # on the meta device; takes the place while the params are not installed


def load_config(model_dir: str | Path) -> Any:
    """Loads the config of a model folder without running code from it. Raises ValueError if it has no valid config."""
    try:
        config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises various exceptions for invalid configs
        if is_out_of_memory(error):
            raise
        raise ValueError(f"the config of {Path(model_dir).name} cannot be used: {error}") from error
    return getattr(config, "get_text_config", lambda: config)() if _is_composite(config) else config


def _is_composite(config: Any) -> bool:
    return bool(getattr(config, "sub_configs", None)) and hasattr(config, "text_config")


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Moves parameters to the meta device at their registration. Buffers stay real, with their modules' values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_meta_model(config: Any, precision: Precision) -> Any:
    """Builds the model of `config` in training mode: parameters on the meta device, real buffers, no initialisation."""
    with _building, no_init_weights(), _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPE[precision], trust_remote_code=False)
    if getattr(config, "generation_config", None) is None and getattr(model, "generation_config", None) is None:
        model.generation_config = GenerationConfig.from_model_config(config)
    model.tie_weights()
    model.train()
    model.requires_grad_(True)
    return model


def dropouts_of(model: nn.Module) -> list[str]:
    """Returns the fields of a model's config that set dropout, and the names of its modules for dropout.

    Dropout that a number in the code of a layer sets, without such a module, is not found. Fields that no layer uses
    are.
    """
    config: dict[str, Any] = model.config.to_dict()  # type: ignore[union-attr, operator]
    fields = [name for name, value in config.items() if "drop" in name and type(value) in (int, float) and value]
    return fields + [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p]


class StandIn(nn.Module):
    """Replaces a layer while the model's own forward runs, and passes its calls to `on_call`."""

    def __init__(self, layer: nn.Module, index: int, on_call: Any) -> None:
        super().__init__()
        # Set without registration as a submodule, so that the layer's parameters are not found through the stand-in.
        object.__setattr__(self, "layer", layer)
        self.index = index
        object.__setattr__(self, "on_call", on_call)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "layer"), name)

    def train(self, mode: bool = True) -> "StandIn":
        """Sets the mode of the layer too, so that its dropout is off in evaluation."""
        self.layer.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.on_call(self.index, args, kwargs)


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Returns the name of the ModuleList of layers, and the list: the outermost of those with the most parameters."""
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            numel = sum(p.numel() for p in module.parameters())
            if best is None or numel > best[0]:
                best = (numel, name, module)
    if best is None or best[0] == 0:
        raise UnsupportedArchitectureError(f"{type(model).__name__} has no nn.ModuleList of layers to stream")
    return best[1], best[2]


def hidden_of(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, bool]:
    """Returns the hidden state among a layer's call arguments, and whether it was passed by keyword."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0], False
    hidden = kwargs.get("hidden_states")
    if isinstance(hidden, torch.Tensor):
        return hidden, True
    raise UnsupportedArchitectureError(f"layer {index} is not called with a hidden state as its first argument")


class _Trace:
    """Traces one run of the model's forward on the meta device, with stand-ins for the layers.

    It records the modules that run before the layers and those that run after them. `num_returned`: the length of the
    tuple that stand-ins return, hidden state first; None: they return the hidden state itself.
    """

    def __init__(self, model: Any, layers: nn.ModuleList, num_returned: int | None) -> None:
        self.model, self.layers = model, layers
        self.num_returned = num_returned
        self.originals = list(layers)
        self.before: list[nn.Module] = []
        self.after: list[nn.Module] = []
        self.num_called = 0
        self.last_output: torch.Tensor | None = None

    def run(self) -> None:
        inside = {id(m) for layer in self.originals for m in layer.modules()}
        hooks = [
            m.register_forward_pre_hook(self._on_module)
            for m in self.model.modules()
            if id(m) not in inside and not isinstance(m, nn.ModuleList)
        ]
        buffers = swap_buffers_to_meta(self.model)
        for i, layer in enumerate(self.originals):
            self.layers[i] = StandIn(layer, i, self._on_layer)
        try:
            run_on_meta(self.model, num_tokens=8)
        finally:
            for i, layer in enumerate(self.originals):
                self.layers[i] = layer
            restore_buffers(buffers)
            for hook in hooks:
                hook.remove()
        if self.num_called != len(self.originals):
            raise UnsupportedArchitectureError(
                f"{type(self.model).__name__} calls {self.num_called} of its {len(self.originals)} layers once each"
            )

    def _on_module(self, module: nn.Module, _: Any) -> None:
        (self.before if self.num_called == 0 else self.after).append(module)

    def _on_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = type(self.model).__name__
        hidden, _ = hidden_of(index, args, kwargs)
        if index != self.num_called:
            raise UnsupportedArchitectureError(f"{name} calls layer {index} where layer {self.num_called} was expected")
        if index > 0 and hidden is not self.last_output:
            raise UnsupportedArchitectureError(
                f"{name} has code between layer {index - 1} and layer {index}: the hidden state changes there"
            )
        others = [t for t in _tensors((args, kwargs)) if t is not hidden and t.requires_grad]
        if others:
            raise UnsupportedArchitectureError(
                f"{name} passes layer {index} further tensors that need gradients (shapes "
                f"{[tuple(t.shape) for t in others]}); that is not supported yet"
            )
        self.num_called += 1
        # A new tensor each time, so that an identity check detects a changed hidden state.
        self.last_output = torch.empty_like(hidden)
        return (
            self.last_output if self.num_returned is None else (self.last_output, *([None] * (self.num_returned - 1)))
        )


def run_on_meta(model: nn.Module, num_tokens: int) -> Any:
    """Runs the model's own forward on meta token ids: shapes and control flow without arithmetic.

    The empty cache is needed, because without one the masking code reads position values to find packed sequences, and
    meta tensors have no values.
    """
    ids = torch.zeros((1, num_tokens), dtype=torch.long, device="meta")
    return run_beside_cache(model, ids, DynamicCache())


def run_beside_cache(model: nn.Module, ids: torch.Tensor, cache: DynamicCache) -> Any:
    """Runs the model's own forward on `ids` (1, S) with a cache that it does not fill.

    The cache's argument is named `cache` since transformers 5.24. Earlier versions, and models with their own code,
    name it `past_key_values`.
    """
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(input_ids=ids, use_cache=False, **{name: cache})


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def swap_buffers_to_meta(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Replaces all buffers by meta tensors, and returns the originals for `restore_buffers`."""
    swapped = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                swapped.append((module, name, buffer))
                module._buffers[name] = buffer.to("meta")
    return swapped


def restore_buffers(swapped: list[tuple[nn.Module, str, torch.Tensor]]) -> None:
    """Restores the buffers that `swap_buffers_to_meta` replaced."""
    for module, name, buffer in swapped:
        module._buffers[name] = buffer


class Partition:
    """A meta model and its blocks: block 0 is the embedding, then come the layers, then the head.

    `sites[b]` are the parameter places of block b's operation: its own parameters, and those shared with other blocks.
    `called_after_layers` are the modules that the model calls after its last layer.
    """

    def __init__(self, model: Any, chunk_numel: int | None = None) -> None:
        self.model = model
        self.name = type(model).__name__
        self.layers_name, self.layer_list = find_layers(model)
        self.layers = list(self.layer_list)
        self.num_blocks = len(self.layers) + 2
        self._refuse_what_is_not_exact()
        trace = self._trace()
        self.num_returned = trace.num_returned
        self.called_after_layers = trace.after
        self._assign(trace, chunk_numel)

    @property
    def head(self) -> BlockIndex:
        """The index of the head, which is the last block."""
        return BlockIndex(self.num_blocks - 1)

    def _trace(self) -> _Trace:
        """Traces the model with the first return form that it accepts: a hidden state, or a tuple (older models)."""
        refusals: list[Exception] = []
        for num_returned in (None, 1, 2, 3):
            trace = _Trace(self.model, self.layer_list, num_returned)
            try:
                trace.run()
            except UnsupportedArchitectureError as refusal:
                refusals.append(refusal)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                # Any other exception of the model's code counts as a refusal.
                refusals.append(UnsupportedArchitectureError(f"{self.name} cannot be traced without weights: {error}"))
            else:
                return trace
        raise refusals[0]

    def _refuse_what_is_not_exact(self) -> None:
        config = self.model.config
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedArchitectureError(f"{self.name} is an encoder-decoder; only causal LMs are supported")
        if getattr(config, "output_router_logits", False):
            raise UnsupportedArchitectureError(
                f"{self.name} has output_router_logits set: its auxiliary router loss is not supported"
            )
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedArchitectureError(f"{self.name} is quantized; full fine-tuning needs plain weights")
        params = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        buffers = sorted(set(self.model.state_dict()) - params)
        if buffers:
            raise UnsupportedArchitectureError(f"{self.name} keeps state in buffers, not parameters: {buffers[:3]}")
        dtypes = {str(p.dtype) for p in self.model.parameters()}
        if len(dtypes) > 1:
            raise UnsupportedArchitectureError(f"{self.name} mixes parameter types: {sorted(dtypes)}")

    def _assign(self, trace: _Trace, chunk_numel: int | None) -> None:
        """Assigns every parameter to a block, and gives every block a flat layout."""
        modules: list[list[tuple[str, nn.Module]]] = [[] for _ in range(self.num_blocks)]
        before = {id(m) for m in trace.before}
        after = {id(m) for m in trace.after}
        layer_of = {id(m): i + 1 for i, layer in enumerate(self.layers) for m in layer.modules()}
        for name, module in self.model.named_modules():
            if id(module) in layer_of:
                modules[layer_of[id(module)]].append((name, module))
                continue
            if id(module) in before:
                modules[0].append((name, module))
            if id(module) in after:
                modules[-1].append((name, module))
            if module._parameters and id(module) not in before | after:
                raise UnsupportedArchitectureError(
                    f"{self.name}: parameters of {name} are used outside its own forward"
                )
        no_decay, divisible = _norm_and_bias_names(self.model), _divisible_names(self.model)
        owner: dict[int, tuple[BlockIndex, str]] = {}
        tied: dict[str, str] = {}
        blocks = []
        for b in range(self.num_blocks):
            index = BlockIndex(b)
            own: list[tuple[str, nn.Parameter]] = []
            for module_name, module in modules[b]:
                for attribute, param in module._parameters.items():
                    if param is None:
                        continue
                    name = f"{module_name}.{attribute}" if module_name else attribute
                    if id(param) not in owner:
                        owner[id(param)] = (index, name)
                        own.append((name, param))
                    elif owner[id(param)][1] != name:
                        tied[name] = owner[id(param)][1]
            blocks.append(_block_layout(index, self._block_name(b), own, no_decay, divisible))
        self._check_all_owned(owner)
        chunk = chunk_numel or choose_chunk_numel([block.numel for block in blocks])
        self.layout = ModelLayout(blocks=tuple(blocks), tied=tied, chunk_numel=chunk)
        self.sites = [self._sites(modules[b], owner) for b in range(self.num_blocks)]
        shared = tuple(
            (BlockIndex(b), *sorted({site.block for site in sites} - {b})) for b, sites in enumerate(self.sites)
        )
        hidden_size, vocab_size = (getattr(self.model.config, name, 0) for name in ("hidden_size", "vocab_size"))
        self.layout = replace(self.layout, shared=shared, hidden_size=hidden_size, vocab_size=vocab_size)

    def grads_used(self, user: int, block: int, cut_matrices: int | None) -> frozenset[str]:
        """Returns the names of those tensors of a block to whose gradients the operation of another block adds.

        A matrix that is cut counts as its parts. `cut_matrices`: as in the job's `TrainingConfig`.
        """
        params = [site.param for site in self.sites[user] if site.block == block]
        return frozenset(name for param in params for name, *_ in param.parts(cut_matrices))

    def _check_all_owned(self, owner: dict[int, tuple[BlockIndex, str]]) -> None:
        missing = [name for name, param in self.model.named_parameters() if id(param) not in owner]
        if missing:
            raise UnsupportedArchitectureError(f"{self.name}: no block uses the parameters {missing[:3]}")

    def _sites(self, modules: list[tuple[str, nn.Module]], owner: dict[int, tuple[BlockIndex, str]]) -> list[ParamSite]:
        slices = {param.name: param for block in self.layout.blocks for param in block.params}
        sites = []
        for _, module in modules:
            for attribute, param in module._parameters.items():
                if param is not None:
                    block, name = owner[id(param)]
                    sites.append(ParamSite(module, attribute, slices[name], block, param))
        return sites

    def _block_name(self, block: int) -> str:
        if block == 0:
            return "embedding"
        return "head" if block == self.num_blocks - 1 else f"{self.layers_name}.{block - 1}"


def _norm_and_bias_names(model: nn.Module) -> set[str]:
    """Returns the parameters without weight decay: biases, 1-D tensors, and all tensors of normalisation modules."""
    names = set()
    for module_name, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        for attribute, param in module._parameters.items():
            if param is not None and (is_norm or attribute.endswith("bias") or param.ndim < 2):
                names.add(f"{module_name}.{attribute}" if module_name else attribute)
    return names


def _divisible_names(model: nn.Module) -> set[str]:
    """Returns the matrices of linear layers and embeddings whose modules all compute as PyTorch.

    Of modules that share a matrix there may be two, an embedding and a linear layer: a tied embedding and its head.
    """
    users: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                users[id(param)].append(module)
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if _computes_plainly(module) and _may_be_cut(users[id(module.weight)])
    }


def _may_be_cut(users: list[nn.Module]) -> bool:
    return len(users) == 1 or (all(map(_computes_plainly, users)) and sorted(map(type, users), key=str) == _TIED)


# A matrix of a tied embedding, and of its head.
_TIED = sorted((nn.Embedding, nn.Linear), key=str)


def _computes_plainly(module: nn.Module) -> bool:
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return type(module) in (nn.Linear, Conv1D)


def _block_layout(
    index: BlockIndex, name: str, params: list[tuple[str, nn.Parameter]], no_decay: set[str], divisible: set[str]
) -> BlockLayout:
    slices, offset = [], 0
    for param_name, param in sorted(params, key=lambda item: item[0] in no_decay):
        slices.append(
            ParamSlice(
                name=param_name,
                shape=tuple(param.shape),
                offset=offset,
                numel=param.numel(),
                decay=param_name not in no_decay,
                is_divisible=param_name in divisible,
            )
        )
        offset += param.numel()
    return BlockLayout(index=index, name=name, params=tuple(slices))


def partition_folder(model_dir: str | Path, precision: Precision) -> Partition:
    """Builds and partitions the model of a folder."""
    return Partition(build_meta_model(load_config(model_dir), precision))
