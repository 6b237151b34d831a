"""A layer whose parameters are on the device only during its calls. Its forward is recomputed in backward.

The forward runs without a graph, and only the call's arguments are kept. Gradients of arguments flow as in plain
PyTorch, even if all layers share an argument. Gradients of parameters go to a flat buffer. The recomputation uses the
random state, the autocast state and the mode of the forward.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from windlass.actors.offload.errors import CannotOffloadError, OffloadMisuseError
from windlass.actors.offload.layers import OffloadedBlock
from windlass.engine.model import GradBuffer


class ParamLender(Protocol):
    """Provides parameters and collects gradients. Called by the training thread."""

    device: torch.device
    num_steps: int  # optimizer steps so far

    def borrow(self, block: OffloadedBlock, *, is_backward: bool) -> torch.Tensor:
        """Returns the block's flat parameters on the device, valid until `give_back`."""

    def give_back(self, block: OffloadedBlock) -> None:
        """Releases a block's parameters. Work that is already queued on the device may still read them."""

    def grads(self, block: OffloadedBlock) -> GradBuffer:
        """Returns the buffer in which the gradients of a step are summed."""

    def backward_done(self, block: OffloadedBlock, *, is_last: bool) -> None:
        """Reports that a call's gradients are complete. `is_last`: the layer has no other call without a backward."""


class OffloadedLayer:
    """Replaces a layer's `forward`."""

    def __init__(self, block: OffloadedBlock, lender: ParamLender) -> None:
        self.block = block
        self.lender = lender
        self.open_calls: weakref.WeakSet[_Call] = weakref.WeakSet()  # calls that wait for their backward
        self.forward = block.layer.forward
        self._is_checked = False
        # Makes the outputs require grad even if no argument does, as the layer's parameters would.
        self._anchor = torch.empty(0, requires_grad=True)
        block.layer.__dict__["forward"] = self.call

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer. The model calls it in place of `forward`."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        needs_graph = self.block.is_trained or any(tensor.requires_grad for tensor in tensors)
        if not (torch.is_grad_enabled() and needs_graph):
            with torch.no_grad(), self.installed() as flat:
                return pytree.tree_map_only(torch.Tensor, lambda out: _apart(out, flat), self.forward(*args, **kwargs))
        call = _Call(self, leaves, structure)
        outputs = _LayerFunction.apply(call, self._anchor, *tensors)  # type: ignore[no-untyped-call]
        return call.rebuilt(outputs)

    @contextlib.contextmanager
    def installed(self, grads: GradBuffer | None = None) -> Iterator[torch.Tensor]:
        """Installs the layer's parameters during the context; with `grads`, their gradients are added there."""
        flat = self.lender.borrow(self.block, is_backward=grads is not None)
        values = {}
        for param in self.block.params:
            view = flat[param.offset : param.stop].view(param.shape)
            value = nn.Parameter(view, requires_grad=param.is_trained)
            if grads is not None and param.is_trained:

                def take(p: torch.Tensor, name: str = param.name, offset: int = param.offset) -> None:
                    assert grads is not None
                    assert p.grad is not None
                    grads.add(name, offset, p.grad)
                    p.grad = None

                value.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            values[param.name] = value
        self.block.install(values)
        try:
            yield flat
        finally:
            self.block.install({})
            self.lender.give_back(self.block)

    def check_graph(self, outputs: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> None:
        """Refuses a layer that uses tensors with requires_grad that are neither arguments nor its parameters.

        Each layer is checked once.
        """
        if self._is_checked:
            return
        params = [module._parameters[attribute] for param in self.block.params for module, attribute in param.sites]
        allowed = {id(tensor) for tensor in [*known, *params]}
        foreign = [leaf for leaf in _leaves_of(outputs) if id(leaf) not in allowed]
        if foreign:
            raise CannotOffloadError(
                f"{self.block.name} uses a tensor of shape {tuple(foreign[0].shape)} that requires grad and is neither "
                "among its arguments nor its own parameter; pass it as an argument"
            )
        self._is_checked = True


class _Call:
    """One call of a layer, from its forward to its backward."""

    def __init__(self, layer: OffloadedLayer, leaves: Sequence[Any], structure: pytree.TreeSpec) -> None:
        self.layer = layer
        self.structure = structure
        self.leaves = [_PLACE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.returned: list[Any] = []  # leaves of the layer's result, with placeholders for tensors
        self.returned_structure: pytree.TreeSpec | None = None
        self.is_training = layer.block.layer.training
        self.num_steps = layer.lender.num_steps
        self.random = _random_state(layer.lender.device)
        self.autocast = _autocast_state(layer.lender.device)
        self._refuse_caches()

    def compute(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Runs the layer's own forward; returns the leaves of its result."""
        args, kwargs = pytree.tree_unflatten(_fill(self.leaves, tensors), self.structure)
        with _autocast(self.autocast):
            returned = self.layer.forward(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(returned)
        if self.returned_structure is not None and structure != self.returned_structure:
            raise CannotOffloadError(f"{self.layer.block.name} returned something else when it was computed again")
        self.returned_structure = structure
        return leaves

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the first forward, without a graph; returns the tensors of its result."""
        block = self.layer.block
        buffers = dict(block.layer.named_buffers())
        watched = {"an argument": tensors, "a buffer": list(buffers.values())}
        before = {what: [tensor._version for tensor in those] for what, those in watched.items()}
        with self.layer.installed() as flat:
            leaves = self.compute(tensors)
            leaves = [_apart(leaf, flat) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for what, those in watched.items():
            if [tensor._version for tensor in those] != before[what]:
                raise CannotOffloadError(
                    f"{block.name} changes {what} in place; computed again in backward, it would find it changed"
                )
        self.returned = [_PLACE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.layer.open_calls.add(self)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def rebuilt(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Returns the layer's result with its tensors replaced by `outputs`, which carry the graph."""
        assert self.returned_structure is not None
        return pytree.tree_unflatten(_fill(self.returned, outputs), self.returned_structure)

    def backward(
        self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Recomputes the layer with a graph and runs its backward; returns the gradients of `tensors`."""
        layer, block = self.layer, self.layer.block
        if layer.lender.num_steps != self.num_steps:
            raise OffloadMisuseError(
                f"a backward reached {block.name} through a forward from before the last step; its parameters have "
                "changed since (plain PyTorch refuses this too): call the model again"
            )
        if block.layer.training is not self.is_training:
            raise OffloadMisuseError(
                f"{block.name} was switched between train() and eval() after its forward and before its backward, "
                "where it must be computed again; switch it afterwards"
            )
        entering = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with _random(self.random, layer.lender.device), torch.enable_grad(), layer.installed(layer.lender.grads(block)):
            outputs = [leaf for leaf in self.compute(entering) if isinstance(leaf, torch.Tensor)]
            pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
            layer.check_graph([output for output, _ in pairs], entering)
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
            del outputs, pairs
        layer.open_calls.discard(self)
        layer.lender.backward_done(block, is_last=not layer.open_calls)
        return [tensor.grad for tensor in entering]

    def _refuse_caches(self) -> None:
        for leaf in self.leaves:
            if any(cls.__name__ == "Cache" for cls in type(leaf).__mro__):
                raise CannotOffloadError(
                    f"{self.layer.block.name} is called with a {type(leaf).__name__}, which it would add to twice, as "
                    "it is computed again in backward; train with `use_cache=False` (`model.config.use_cache = False`)"
                )


class _LayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        outputs = call.forward(tensors)
        ctx.mark_non_differentiable(*[output for output in outputs if not output.is_floating_point()])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.call.backward(ctx.saved_tensors, grads))


class _Place:
    """The placeholder of a tensor in a list of leaves."""


_PLACE = _Place()


def _fill(leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    remaining = iter(tensors)
    return [next(remaining) if leaf is _PLACE else leaf for leaf in leaves]


def _apart(output: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Copies an output that is a view of a parameter, because the parameter's memory will be reused."""
    return output.clone() if output.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() else output


def _leaves_of(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the autograd leaves from which the outputs were computed."""
    stack: list[Any] = []
    for output in outputs:
        if output.grad_fn is None:
            yield output
        else:
            stack.append(output.grad_fn)
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        stack += [following for following, _ in node.next_functions]


# --- random state and autocast ----------------------------------------------------------------------------------------


def _random_state(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


@contextlib.contextmanager
def _random(states: Sequence[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Sets the random state to `states` during the context, and restores the present one afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield


def _autocast_state(device: torch.device) -> list[tuple[str, torch.dtype | None]]:
    """Returns autocast's dtype for each type of device; None if it is off."""
    kinds = sorted({"cpu", device.type})
    return [(kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in kinds]


@contextlib.contextmanager
def _autocast(state: Sequence[tuple[str, torch.dtype | None]]) -> Iterator[None]:
    """Restores an autocast state during the context, but without its cache.

    The cache would hold a copy of every layer's parameters.
    """
    with contextlib.ExitStack() as stack:
        for kind, dtype in state:
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False)
                if dtype is not None
                else torch.autocast(kind, enabled=False)
            )
        yield
