"""What the forward pass leaves for the backward pass: kept on the device, swapped out of it, or computed again.

An operator is named as torch names it, `aten.mm.default`; `aten.mm.default#2` is its third call in the block, and `*`
stands for all. Views are no operators: they follow what they look into. Scaled-dot-product attention has one name,
whichever kernel of torch's computes it: plans for GPUs are made where there is none.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum

EVERY_OPERATOR = "*"
ATTENTION = "aten.scaled_dot_product_attention.default"
# What is smaller stays on the device also where its operator is swapped: seeds of random numbers, of which some kernels
# of attention put out two. A slot and a copy for each would cost more than they spare.
LEAST_SWAPPED_NBYTES = 64


class Place(Enum):
    """Where an operator's output is between the forward pass and the backward pass."""

    KEPT = "kept"  # on the device
    SWAPPED = "swapped"  # in the store
    NOWHERE = "nowhere"  # computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """The choice for one block; by default its input is kept and everything else is computed again.

    With `recompute`, outputs of `kept` and `swapped` operators are held, and backward begins with a second forward pass
    that computes what they and the input do not give. Without it, all that autograd saves is held, the outputs of
    `swapped` operators in the store and the rest on the device, and backward computes nothing again.
    """

    swap_input: bool = False
    recompute: bool = True
    kept: frozenset[str] = frozenset()
    swapped: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        both = sorted(self.kept & self.swapped)
        if both:
            raise ValueError(f"operators {both} are to be kept and to be swapped; choose one")
        if self.kept and not self.recompute:
            raise ValueError(
                f"operators {sorted(self.kept)} are to be kept in a block that recomputes nothing; all that is not "
                "swapped is kept there: leave `kept` empty"
            )

    @property
    def swaps(self) -> bool:
        """Whether anything goes to the store."""
        return self.swap_input or bool(self.swapped)

    @property
    def needs_grad(self) -> bool:
        """Whether the forward pass runs as autograd would run it, with gradients on."""
        return not self.recompute or bool(self.kept or self.swapped)

    def place_of(self, name: str, call: int) -> Place:
        """Where the output of an operator's call goes; a single call's choice precedes its operator's."""
        for key in (f"{name}#{call}", name, EVERY_OPERATOR):
            if key in self.swapped:
                return Place.SWAPPED
            if key in self.kept:
                return Place.KEPT
        return Place.NOWHERE if self.recompute else Place.KEPT


RECOMPUTE_ALL = BlockActivations()


class ActivationChoice(StrEnum):
    """The same for every layer, by a name."""

    RECOMPUTE = "recompute"  # a layer's input stays on the device, the rest is computed again
    # A layer's input goes to the store, the rest is computed again: what ZeRO-Infinity and MemAscend do.
    RECOMPUTE_SWAP_INPUT = "recompute_swap_input"
    KEEP = "keep"  # all that autograd saves stays on the device
    SWAP = "swap"  # all that autograd saves goes to the store

    def of_layers(self, num_layers: int) -> tuple[BlockActivations, ...]:
        """For a placement."""
        return (_CHOICES[self],) * num_layers


_CHOICES = {
    ActivationChoice.RECOMPUTE: RECOMPUTE_ALL,
    ActivationChoice.RECOMPUTE_SWAP_INPUT: BlockActivations(swap_input=True),
    ActivationChoice.KEEP: BlockActivations(recompute=False),
    ActivationChoice.SWAP: BlockActivations(recompute=False, swap_input=True, swapped=frozenset({EVERY_OPERATOR})),
}


def in_words(choice: BlockActivations) -> str:
    """Its name, or all that it says."""
    return next((name.value for name, named in _CHOICES.items() if named == choice), str(choice))
