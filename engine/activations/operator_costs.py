"""The output sizes and FLOPs of a layer's operators, derived from shapes alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from windlass.engine.activations.selective_recompute import Layer, OperatorFacts, OperatorMode, storage_ref, tensors_in

_aten = torch.ops.aten
# PyTorch has no FLOP formula for the first, which runs on CPUs. For the others, the formula of PyTorch 2.11 refuses
# keys and values with fewer heads than the queries.
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """One call of an operator in the forward pass."""

    name: str  # as policies name it: "aten.mm.default#2"
    outputs_nbytes: tuple[int, ...]  # of the storages that hold its outputs: whole storages are kept or swapped
    num_flops: int  # a multiply-add counts as two; only matrix products, attention and convolutions have any
    is_saved: bool  # autograd saves its output
    reads: tuple[int, ...]  # the operators before it whose outputs it reads


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """A layer's forward pass."""

    operators: list[OperatorCost]
    saves_input: bool  # autograd saves the layer's input


def list_operators(layer: Layer, entering: torch.Tensor) -> LayerCost:
    """Lists the operators of a layer in call order. `entering` and the layer's params may be fake tensors."""
    entering = entering.detach().requires_grad_()
    mode = _Lister(storage_ref(entering))
    with torch.enable_grad(), saved_tensors_hooks(mode.note_saved, lambda packed: entering), mode:
        layer(entering)
    return LayerCost(
        operators=[
            OperatorCost(name=name, outputs_nbytes=nbytes, num_flops=num_flops, is_saved=i in mode.saved, reads=reads)
            for i, (name, nbytes, num_flops, reads) in enumerate(mode.operators)
        ],
        saves_input=mode.saves_input,
    )


class _Lister(OperatorMode):  # type: ignore[no-untyped-call]
    def __init__(self, entering: StorageWeakRef) -> None:
        super().__init__()
        self.operators: list[
            tuple[str, tuple[int, ...], int, tuple[int, ...]]
        ] = []  # name, bytes, FLOPs, what it reads
        self.saved: set[int] = set()
        self.saves_input = False
        self._entering = entering
        self._num_calls: dict[str, int] = {}
        self._maker: dict[StorageWeakRef, int] = {}

    def note_saved(self, tensor: torch.Tensor) -> None:
        ref = storage_ref(tensor)
        if ref in self._maker:
            self.saved.add(self._maker[ref])
        elif ref == self._entering:
            self.saves_input = True

    def operator(self, facts: OperatorFacts, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        call = self._num_calls.get(facts.name, 0)
        self._num_calls[facts.name] = call + 1
        known = {storage_ref(tensor) for tensor in tensors_in((args, kwargs))}
        reads = tuple(sorted({self._maker[ref] for ref in known if ref in self._maker}))
        nbytes: list[int] = []
        for tensor in tensors_in(result):
            ref = storage_ref(tensor)
            if ref not in known or facts.written:
                nbytes.append(tensor.untyped_storage().nbytes())
                self._maker[ref] = len(self.operators)
                known.add(ref)
        num_flops = _num_flops(getattr(func, "overloadpacket", None), args, kwargs, result)
        self.operators.append((f"{facts.name}#{call}", tuple(nbytes), num_flops, reads))
        return result


def _num_flops(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Returns the FLOPs of an operator's call, by PyTorch's formulas; 0 if it has none."""
    if packet in _ATTENTION:
        return _attention_flops(*args[:3])
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Returns the FLOPs of attention. Tensors are (batch, heads, tokens, width). All heads of the queries count."""
    num_heads = query.shape[1]
    key_shape, value_shape = ((batch, num_heads, *rest) for batch, _, *rest in (key.shape, value.shape))
    return int(sdpa_flop_count(query.shape, key_shape, value_shape))  # type: ignore[no-untyped-call]
