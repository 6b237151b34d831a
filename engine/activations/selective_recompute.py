"""Runs a second forward pass that recomputes only the outputs that the backward pass lacks.

The first pass is recorded below autograd, operator by operator: the operators, the inputs of each one, and the outputs
that the block's policy holds. In the second pass the n-th operator is the same one:

- If its output is held, it returns the held output.
- If no operator that must run reads its output, it returns memory with undefined contents.
- Else it is computed.

Both passes run with gradients enabled, because operators choose their kernels by that.

A Python autograd function may launch its own kernels. Their reads and in-place writes are not visible here. So for a
block with such a function copies are held, and all other outputs are recomputed. One that sets `is_one_operator` calls
nothing but `as_one_operator` in its forward pass, and so is seen like an operator.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from windlass.engine.activations.saved_tensors import SwappedView, UnitSwaps
from windlass.engine.memory_plan import ATTENTION, LEAST_SWAPPED_NBYTES, BlockActivations, Place

# The device, dtypes, shapes and PyTorch version decide which of these runs. A policy treats all of them alike.
_FORMS_OF_ATTENTION = frozenset(
    f"aten._scaled_dot_product_{form}.default"
    for form in (
        "cudnn_attention",
        "efficient_attention",
        "flash_attention",
        "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
)

Layer = Callable[[torch.Tensor], torch.Tensor]


class RecomputeMismatchError(RuntimeError):
    """A block called other operators than in its first pass, so the held outputs do not fit."""


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """The properties of an operator, from its schema."""

    name: str  # as policies name it
    is_view: bool
    written: tuple[int | str, ...]  # arguments that it writes: positions, or names of keyword-only ones
    returns_written: bool  # it writes exactly one argument and returns only that one
    is_random: bool


@functools.cache
def facts_of(operator: Any) -> OperatorFacts:
    """Returns the properties of an operator."""
    schema = getattr(operator, "_schema", None)
    if schema is None:  # a higher-order operator
        return OperatorFacts(str(operator), False, (), False, True)
    aliases = [r.alias_info for r in schema.returns]
    written = tuple(
        a.name if a.kwarg_only else i
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    return OperatorFacts(
        name=ATTENTION if str(operator) in _FORMS_OF_ATTENTION else str(operator),
        # Operators of `prim` query a tensor's device: they compute nothing, and not every pass calls them.
        is_view=operator.namespace == "prim" or any(alias is not None and not alias.is_write for alias in aliases),
        written=written,
        returns_written=len(written) == len(aliases) == 1 and aliases[0] is not None,
        is_random=torch.Tag.nondeterministic_seeded in operator.tags,
    )


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested arguments or results."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def storage_ref(tensor: torch.Tensor) -> StorageWeakRef:
    """Returns a weak reference to a tensor's storage. While it exists, no other storage compares equal to it."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_worth_swapping(tensor: torch.Tensor) -> bool:
    """Checks whether a tensor's storage is large enough to be swapped."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() >= LEAST_SWAPPED_NBYTES


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts each operator below autograd, except views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paused = False  # True while our own hooks call torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        if self.paused or facts.is_view:
            return func(*args, **kwargs)
        return self.operator(facts, func, args, kwargs)

    def operator(self, facts: OperatorFacts, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls the operator or replaces its result. Subclasses implement it."""
        raise NotImplementedError


class _Standing:
    """A function that a mode calls in place of an operator. The mode does not see the operators in it."""

    def __init__(self, operator: Any, compute: Callable[[], torch.Tensor]) -> None:
        self.overloadpacket = operator.overloadpacket  # for those that count FLOPs
        self._compute = compute

    def __call__(self, *_: Any) -> torch.Tensor:
        return self._compute()


def as_one_operator(operator: Any, compute: Callable[[], torch.Tensor], *args: Any) -> torch.Tensor:
    """Returns what `compute` computes. A mode that intercepts operators sees a call of `operator` with `args` instead.

    So its output can be held, and where it is, nothing is computed. `compute` must return a new tensor.
    """
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, OperatorMode) and not mode.paused]
    if not modes:
        return compute()
    (mode,) = modes
    mode.paused = True
    try:
        output: torch.Tensor = mode.operator(facts_of(operator), _Standing(operator, compute), args, {})
    finally:
        mode.paused = False
    return output


class Names(OperatorMode):  # type: ignore[no-untyped-call]
    """Records for each storage the operator that made it, and the number of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls: dict[str, int] = {}
        self.maker: dict[StorageWeakRef, tuple[str, int]] = {}

    def operator(self, facts: OperatorFacts, func: Any, args: Any, kwargs: Any) -> Any:
        call = self.num_calls.get(facts.name, 0)
        self.num_calls[facts.name] = call + 1
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            ref = storage_ref(tensor)
            if facts.written or ref not in self.maker:  # the schemas of some views do not mark them as views
                self.maker[ref] = (facts.name, call)
        return result


@dataclass(slots=True)
class _Operator:
    """One operator of the first pass."""

    facts: OperatorFacts
    inputs: tuple[int, ...]  # operators whose outputs it reads
    is_needed: bool  # by autograd or by the program; `finish` adds operators whose outputs these read
    held: list[Any] | None = None  # outputs: tensors, swapped tensors, or other values
    is_tuple: bool = False
    empties: list[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]] = field(default_factory=list)
    random_states: list[torch.Tensor] = field(default_factory=list)  # before it ran

    def drop(self) -> None:
        """Discards the held outputs."""
        for item in self.held or ():
            if isinstance(item, SwappedView):
                item.swapped.drop()
        self.held = None


class SelectiveRecompute:
    """A recorded forward pass that can run a second time."""

    def __init__(self, operators: list[_Operator], generators: Sequence[torch.Generator]) -> None:
        self._operators = operators
        self._generators = generators

    def run(self, layer: Layer, entering: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output with its graph. The output's contents are undefined. Discards held outputs.

        Raises:
            RecomputeMismatchError: the layer calls other operators than in its first pass.
        """
        mode = _Player(self._operators, self._generators)
        with torch.enable_grad(), mode:
            output = layer(entering)
        mode.check_end()
        return output


@functools.cache
def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """Returns the random generators of operators on the host and on a device."""
    # With fake tensors the device need not exist.
    if device.type != "cuda" or not torch.cuda.is_available():
        return (torch.default_generator,)
    current = torch.cuda.current_device()  # initialises CUDA, which creates its generators
    return (torch.default_generator, torch.cuda.default_generators[current if device.index is None else device.index])


def record(
    layer: Layer, entering: torch.Tensor, policy: BlockActivations, swaps: UnitSwaps, *, copies: bool = False
) -> tuple[torch.Tensor, SelectiveRecompute, bool]:
    """Computes a layer without a graph and holds the outputs that the policy names; with `copies`, copies of them.

    The third result tells whether the layer has a Python autograd function. If it has one, nothing is held without
    `copies`.
    """
    mode = _Recorder(policy, swaps, entering.device, copies=copies)
    with torch.enable_grad(), saved_tensors_hooks(mode.note_saved, _unpack_nothing), mode:
        output = layer(entering.detach().requires_grad_())
    has_function = has_python_function(output)
    return output.detach(), mode.finish(sees_all=not has_function), has_function


def has_python_function(output: torch.Tensor) -> bool:
    """Checks whether a `torch.autograd.Function` in Python took part in computing a tensor."""
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not is_one_operator(node):
            return True
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    return False


def is_one_operator(node: Any) -> bool:
    """Checks whether a node of a Python autograd function computes its forward pass by `as_one_operator`."""
    return getattr(node._forward_cls, "is_one_operator", False)


def _unpack_nothing(packed: Any) -> torch.Tensor:
    raise AssertionError("the graph of a recorded pass is thrown away")


class _Recorder(OperatorMode):  # type: ignore[no-untyped-call]
    def __init__(self, policy: BlockActivations, swaps: UnitSwaps, device: torch.device, *, copies: bool) -> None:
        super().__init__()
        self._copies = copies
        self._policy = policy
        self._swaps = swaps
        self._device = device
        self._operators: list[_Operator] = []
        self._num_calls: dict[str, int] = {}
        self._maker: dict[StorageWeakRef, int] = {}
        self._generators = generators_of(device)

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Marks the operator that made a tensor as needed, because autograd would save the tensor."""
        maker = self._maker.get(storage_ref(tensor))
        if maker is not None:
            self._operators[maker].is_needed = True

    def operator(self, facts: OperatorFacts, func: Any, args: Any, kwargs: Any) -> Any:
        read = {storage_ref(tensor) for tensor in tensors_in((args, kwargs))}
        operator = _Operator(facts, tuple(self._maker[ref] for ref in read if ref in self._maker), is_needed=False)
        if facts.is_random:
            operator.random_states = [generator.get_state() for generator in self._generators]
        written = list(tensors_in([args[key] if isinstance(key, int) else kwargs.get(key) for key in facts.written]))
        for tensor in written:
            maker = self._maker.get(storage_ref(tensor))
            if maker is not None:
                self._operators[maker].drop()  # the write changes the held tensor itself
            else:
                operator.is_needed = True  # it writes a tensor that the block did not make
        result = func(*args, **kwargs)
        made = {storage_ref(tensor) for tensor in tensors_in(result)}
        self._hold(operator, result, is_fresh=not facts.written and made.isdisjoint(read))
        for ref in made.union(storage_ref(tensor) for tensor in written):
            self._maker[ref] = len(self._operators)
        self._operators.append(operator)
        return result

    def _hold(self, operator: _Operator, result: Any, *, is_fresh: bool) -> None:
        items = list(result) if isinstance(result, (list, tuple)) else [result]
        tensors = [item for item in items if isinstance(item, torch.Tensor)]
        facts = operator.facts
        # The program's control flow may depend on a result that is no floating-point tensor.
        is_plain = bool(tensors) and len(tensors) == len(items) and all(t.is_floating_point() for t in tensors)
        if not is_plain or isinstance(result, list) or (facts.written and not facts.returns_written):
            operator.is_needed = True
        operator.is_tuple = isinstance(result, tuple)
        operator.empties = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        call = self._num_calls.get(facts.name, 0)
        self._num_calls[facts.name] = call + 1
        place = self._policy.place_of(facts.name, call)
        if place is Place.NOWHERE or not is_fresh or not tensors or isinstance(result, list):
            return
        operator.held = [self._held(item, place) for item in items]

    def _held(self, item: Any, place: Place) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if self._copies:
            item = item.clone()
        if place is Place.SWAPPED and item.device == self._device and is_worth_swapping(item):
            return self._swaps.swap_out(item)
        return item.detach()

    def finish(self, *, sees_all: bool) -> SelectiveRecompute:
        """Decides which operators are recomputed, and discards held outputs that the second pass does not need."""
        if not sees_all:
            for operator in self._operators:
                operator.is_needed = True
                if not self._copies:
                    operator.drop()
        for operator in reversed(self._operators):
            if not operator.is_needed:
                operator.drop()
            elif operator.held is None:
                for i in operator.inputs:
                    self._operators[i].is_needed = True
        has_gap = False
        for operator in self._operators:
            is_computed = operator.is_needed and operator.held is None
            if operator.is_needed:
                operator.empties = []
            if not (is_computed and has_gap):
                operator.random_states = []
            has_gap |= operator.facts.is_random and not is_computed
        return SelectiveRecompute(self._operators, self._generators)


class _Player(OperatorMode):  # type: ignore[no-untyped-call]
    def __init__(self, operators: list[_Operator], generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self._operators = operators
        self._generators = generators
        self._next = 0

    def operator(self, facts: OperatorFacts, func: Any, args: Any, kwargs: Any) -> Any:
        operator = self._operators[self._next] if self._next < len(self._operators) else None
        if operator is None or operator.facts is not facts:
            first = "no operator" if operator is None else operator.facts.name
            raise RecomputeMismatchError(
                f"operator {self._next} of a block is {facts.name} and was {first} the first time; its forward does "
                "not follow from its inputs alone: let the plan recompute all of the block, or nothing"
            )
        self._next += 1
        if operator.held is not None:
            items = [item.tensor() if isinstance(item, SwappedView) else item for item in operator.held]
            operator.held = None
            return tuple(items) if operator.is_tuple else items[0]
        if operator.is_needed:
            for generator, state in zip(self._generators, operator.random_states, strict=False):
                generator.set_state(state)
            return func(*args, **kwargs)
        if facts.returns_written:
            (key,) = facts.written
            return args[key] if isinstance(key, int) else kwargs[key]
        empties = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in operator.empties
        ]
        return tuple(empties) if operator.is_tuple else empties[0]

    def check_end(self) -> None:
        """Raises RecomputeMismatchError if operators of the first pass were not called again."""
        if self._next < len(self._operators):
            raise RecomputeMismatchError(
                f"a block called {len(self._operators)} operators the first time and {self._next} now; its forward "
                "does not follow from its inputs alone: let the plan recompute all of the block, or nothing"
            )
