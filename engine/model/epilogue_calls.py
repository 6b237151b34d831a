"""Records the calls that a model's own forward makes after its last layer, and repeats them for other hidden states.

A call is one of a module, or of a torch function between modules. Whatever happens inside a module is repeated by
calling the module.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

# Functions that return no tensor, and depend on shape and type only.
_OF_SHAPES = frozenset(
    {
        "__get__",  # of a property, such as the shape
        "__len__",
        "dim",
        "element_size",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "numel",
        "size",
        "stride",
    }
)


@dataclass(frozen=True, slots=True)
class _Place:
    """The number of a tensor that depends on the hidden state. The hidden state itself has 0."""

    number: int


@dataclass(slots=True)
class _Call:
    function: Callable[..., Any]
    leaves: list[Any]  # of (args, kwargs); a `_Place` takes the place of a tensor
    spec: TreeSpec
    outputs: list[tuple[int, int]]  # (index among the result's leaves, number of the tensor)
    last_uses: list[int]  # numbers of tensors that no later call needs


class EpilogueCalls(TorchFunctionMode):
    """Records calls while its context is entered. Then it repeats them, if that gives the same results.

    A recording is not repeatable in three cases. It has a tensor of unknown origin. A call may read values. Or a call
    runs in another gradient mode, as inside a Python autograd function.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module], hidden: torch.Tensor) -> None:
        """`modules`: those that the model calls after its last layer. `hidden`: the state that the calls begin with."""
        super().__init__()
        self.is_repeatable = True
        self._model, self._modules = model, list(dict.fromkeys(modules))
        self._mode = _mode(hidden.device)
        self._device = hidden.device
        self._calls: list[_Call] = []
        # By the `id` of a tensor. The references are weak, because a recorded slice must not need more memory.
        self._places: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._num_places = 0
        self._depth = 0  # of modules whose forward runs
        self._logits = -1
        self._handles: list[Any] = []
        self._place_of_new(hidden)

    def __enter__(self) -> "EpilogueCalls":
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._enters_module, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leaves_module, with_kwargs=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._depth == 0:
            self._note(func, args, kwargs, result)
        return result

    def end(self, logits: torch.Tensor) -> None:
        """Ends the recording with the tensor that the model's forward returned as logits."""
        logits_place = self._place(logits)
        if logits_place is None:
            self._refuse()
            return
        self._logits = logits_place.number
        used = {self._logits}
        for call in reversed(self._calls):
            numbers = {leaf.number for leaf in call.leaves if isinstance(leaf, _Place)}
            call.last_uses = sorted(numbers - used)
            used |= numbers
            call.outputs = [output for output in call.outputs if output[1] in used]
        self._places.clear()

    def repeat(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits of another hidden state of the same shape."""
        assert self.is_repeatable, "some calls depend on values, so they cannot be repeated"
        tensors = {0: hidden}
        del hidden
        for call in self._calls:
            _run(call, tensors)
        return tensors[self._logits]

    # --- private ----------------------------------------------------------------------------------------------------

    def _enters_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1

    def _leaves_module(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._note(module, args, kwargs, result)

    def _note(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        if not self.is_repeatable:
            return
        leaves, spec = tree_flatten((args, kwargs))
        results = tree_leaves(result)
        has_tensor = any(isinstance(leaf, torch.Tensor) for leaf in results)
        if not has_tensor and getattr(function, "__name__", "") in _OF_SHAPES:
            return  # its result is the same for every hidden state of this shape
        if not has_tensor or _mode(self._device) != self._mode or not all(map(self._is_known, leaves)):
            self._refuse()
            return
        leaves = [self._place(leaf) or leaf for leaf in leaves]
        outputs = [(i, self._place_of_new(leaf)) for i, leaf in enumerate(results) if isinstance(leaf, torch.Tensor)]
        self._calls.append(_Call(function, leaves, spec, outputs, []))

    def _is_known(self, leaf: object) -> bool:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter) or self._place(leaf) is not None:
            return True
        return any(leaf is buffer for buffer in self._model.buffers())

    def _place(self, leaf: object) -> _Place | None:
        ref, number = self._places.get(id(leaf), (None, -1))
        return _Place(number) if ref is not None and ref() is leaf else None

    def _place_of_new(self, tensor: torch.Tensor) -> int:
        number = self._num_places
        self._num_places += 1
        self._places[id(tensor)] = (weakref.ref(tensor), number)
        return number

    def _refuse(self) -> None:
        self.is_repeatable = False
        self._calls.clear()
        self._places.clear()


def _mode(device: torch.device) -> tuple[bool, bool]:
    """Returns whether gradients are recorded, and whether types are cast automatically."""
    casts = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.is_grad_enabled(), casts


def _run(call: _Call, tensors: dict[int, torch.Tensor]) -> None:
    """Repeats one call. Tensors that no later call needs are released when it ends, as in the model's own forward."""
    leaves = [tensors[leaf.number] if isinstance(leaf, _Place) else leaf for leaf in call.leaves]
    for number in call.last_uses:
        del tensors[number]
    args, kwargs = tree_unflatten(leaves, call.spec)
    results = tree_leaves(call.function(*args, **kwargs))
    for index, number in call.outputs:
        tensors[number] = results[index]
