"""What the operators of a layer put out and cost, found by their shapes alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from windlass.engine.activations_replay import Layer, OperatorFacts, OperatorMode, storage_ref, tensors_in

_aten = torch.ops.aten
# Torch has no formula for this one; it takes the same arguments.
_SAME_FLOPS = {_aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """One call of an operator in the forward pass."""

    name: str  # as policies name it: "aten.mm.default#2"
    output_nbytes: int  # of the storages that hold its output, as they would be kept or swapped; 0 if it only looks
    num_flops: int  # a multiplication and an addition are two; what is no product or convolution has none
    is_saved: bool  # autograd saves its output
    reads: tuple[int, ...]  # the operators before it whose outputs it reads


def list_operators(layer: Layer, entering: torch.Tensor) -> list[OperatorCost]:
    """The operators of a layer in their order; `entering` and the layer's params may be fake."""
    mode = _Lister()
    with torch.enable_grad(), saved_tensors_hooks(mode.note_saved, lambda packed: entering), mode:
        layer(entering.detach().requires_grad_())
    return [
        OperatorCost(name=name, output_nbytes=nbytes, num_flops=num_flops, is_saved=i in mode.saved, reads=reads)
        for i, (name, nbytes, num_flops, reads) in enumerate(mode.operators)
    ]


class _Lister(OperatorMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, int, int, tuple[int, ...]]] = []  # name, bytes, FLOPs, what it reads
        self.saved: set[int] = set()
        self._num_calls: dict[str, int] = {}
        self._maker: dict[StorageWeakRef, int] = {}

    def note_saved(self, tensor: torch.Tensor) -> None:
        maker = self._maker.get(storage_ref(tensor))
        if maker is not None:
            self.saved.add(maker)

    def operator(self, facts: OperatorFacts, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        call = self._num_calls.get(facts.name, 0)
        self._num_calls[facts.name] = call + 1
        known = {storage_ref(tensor) for tensor in tensors_in((args, kwargs))}
        reads = tuple(sorted({self._maker[ref] for ref in known if ref in self._maker}))
        nbytes = 0
        for tensor in tensors_in(result):
            ref = storage_ref(tensor)
            if ref not in known or facts.written:
                nbytes += tensor.untyped_storage().nbytes()
                self._maker[ref] = len(self.operators)
                known.add(ref)
        packet: Any = getattr(func, "overloadpacket", None)
        formula: Callable[..., int] | None = flop_registry.get(_SAME_FLOPS.get(packet, packet))
        num_flops = formula(*args, **kwargs, out_val=result) if formula is not None else 0
        self.operators.append((f"{facts.name}#{call}", nbytes, int(num_flops), reads))
        return result
