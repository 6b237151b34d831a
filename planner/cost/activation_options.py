"""The options for a layer's activations, from recomputing everything to keeping everything.

Outputs of operators are kept one after the other. The next one is always that which saves most FLOP per byte.

Source: Ratel, section IV-D (its offloading benefit, of a whole layer there).
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from windlass.engine.memory_plan import (
    ACTIVATION_SLOT_NBYTES,
    EVERY_OPERATOR,
    LEAST_SWAPPED_NBYTES,
    RECOMPUTE_ALL,
    BlockActivations,
)
from windlass.planner.cost.model_profile import NO_WORK, LayerProfile, OperatorProfile, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOption:
    """A choice for a layer's activations, with its bytes and work for one micro-batch."""

    choice: BlockActivations
    held_nbytes: int  # on the device, between the forward pass and the backward pass
    out_nbytes: tuple[int, ...]  # of each swapped tensor, in the order in which they leave the device
    num_slots: int  # slots of the swapped tensors in host memory or on the SSDs
    again: Work  # work of recomputation

    @property
    def swapped_nbytes(self) -> int:
        """The bytes of all swapped tensors."""
        return sum(self.out_nbytes)


# A function that returns the options for a layer's activations.
Ways = Callable[[LayerProfile], Iterable[ActivationOption]]


def by_benefit(layer: LayerProfile) -> list[OperatorProfile]:
    """Sorts operators in the order in which their outputs should be kept. Leaves out those that then save no work."""
    order: list[OperatorProfile] = []
    left = [operator for operator in layer.operators if operator.nbytes]
    again = layer.num_flops

    def after(operator: OperatorProfile) -> int:
        return layer.work_again({operator.name, *(held.name for held in order)}).num_flops

    while left:
        best = max(left, key=lambda operator: (again - after(operator)) / operator.nbytes)
        if (less := after(best)) >= again:
            break
        again = less
        order.append(best)
        left.remove(best)
    return order


@functools.lru_cache(maxsize=256)
def ways_of_layer(layer: LayerProfile, *, slot_nbytes: int = ACTIVATION_SLOT_NBYTES) -> tuple[ActivationOption, ...]:
    """Returns the options for a layer: its input kept or swapped, and the first outputs kept or swapped."""
    return tuple(_ways(layer, slot_nbytes))


def holding_ways(layer: LayerProfile) -> tuple[ActivationOption, ...]:
    """Returns the options that keep the best operator's output, and all useful outputs; () if no output saves work."""
    holding = [way for way in ways_of_layer(layer) if way.choice.kept and not way.choice.swap_input]
    return (holding[0], holding[-1]) if holding else ()


def _ways(layer: LayerProfile, slot_nbytes: int) -> Iterator[ActivationOption]:
    order = by_benefit(layer)
    saved = tuple(layer.saved)
    for swap_input in (False, True):
        for number in range(len(order) + 1):
            held = tuple(order[:number])
            names = frozenset(operator.name for operator in held)
            again = layer.work_again(names)
            kept = BlockActivations(swap_input=swap_input, kept=names) if swap_input or names else RECOMPUTE_ALL
            yield _counted(layer, slot_nbytes, kept, held=held, again=again)
            if names:
                swapped = BlockActivations(swap_input=swap_input, swapped=names)
                yield _counted(layer, slot_nbytes, swapped, swapped=held, again=again)
        if swap_input and not layer.saves_input:
            continue  # without recomputation, nothing reads this input
        for swaps in (False, True):
            names = frozenset({EVERY_OPERATOR} if swaps else ())
            everything = BlockActivations(swap_input=swap_input, recompute=False, swapped=names)
            held, gone = ((), saved) if swaps else (saved, ())
            yield _counted(layer, slot_nbytes, everything, held=held, swapped=gone, again=NO_WORK)


def _counted(
    layer: LayerProfile,
    slot_nbytes: int,
    choice: BlockActivations,
    *,
    held: tuple[OperatorProfile, ...] = (),
    swapped: tuple[OperatorProfile, ...] = (),
    again: Work,
) -> ActivationOption:
    # Without recomputation, the input is kept only if autograd saves it.
    input_nbytes = layer.input_nbytes if choice.recompute or layer.saves_input else 0
    of_swapped = [nbytes for operator in layer.operators if operator in swapped for nbytes in operator.outputs_nbytes]
    gone = [nbytes for nbytes in of_swapped if nbytes >= LEAST_SWAPPED_NBYTES]
    out = [input_nbytes, *gone] if choice.swap_input else gone
    held_nbytes = sum(operator.nbytes for operator in held) + sum(of_swapped) - sum(gone)
    return ActivationOption(
        choice=choice,
        held_nbytes=held_nbytes + (0 if choice.swap_input else input_nbytes),
        out_nbytes=tuple(out),
        num_slots=sum(-(-nbytes // slot_nbytes) for nbytes in out),
        again=again,
    )
