"""Policies for activations between the forward and backward pass: kept on the device, swapped out, or recomputed.

An operator has PyTorch's name, `aten.mm.default`; `aten.mm.default#2` is its third call in the block, and `*` stands
for all operators. Views do not count as operators, because they share their base's memory. Scaled-dot-product attention
has one name for all of PyTorch's kernels, because plans for GPUs are made on machines without one.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum

EVERY_OPERATOR = "*"
ATTENTION = "aten.scaled_dot_product_attention.default"
# Bytes: smaller storages stay on the device even if their operator is swapped, because a slot and a copy would cost
# more than they save. Examples are the random seeds that some attention kernels return.
LEAST_SWAPPED_NBYTES = 64


class Place(Enum):
    """The place of an operator's output between the forward pass and the backward pass."""

    KEPT = "kept"  # on the device
    SWAPPED = "swapped"  # in the store
    NOWHERE = "nowhere"  # discarded and recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """The policy for one block. By default its input is kept and everything else is recomputed.

    With `recompute`, the outputs of `kept` and `swapped` operators are held. The backward pass begins with a second
    forward pass that computes the missing outputs. Without it, all tensors that autograd saves are held: outputs of
    `swapped` operators in the store, the others on the device. Then the backward pass recomputes nothing.
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
        """True if any activation goes to the store."""
        return self.swap_input or bool(self.swapped)

    @property
    def needs_grad(self) -> bool:
        """True if the forward pass runs with gradients enabled."""
        return not self.recompute or bool(self.kept or self.swapped)

    def place_of(self, name: str, call: int) -> Place:
        """Returns the place of the output of an operator's call. A choice for a single call precedes its operator's."""
        for key in (f"{name}#{call}", name, EVERY_OPERATOR):
            if key in self.swapped:
                return Place.SWAPPED
            if key in self.kept:
                return Place.KEPT
        return Place.NOWHERE if self.recompute else Place.KEPT


RECOMPUTE_ALL = BlockActivations()


class ActivationChoice(StrEnum):
    """The named policies, each the same for every layer."""

    RECOMPUTE = "recompute"  # a layer's input stays on the device, the rest is recomputed
    # A layer's input goes to the store, the rest is recomputed, as in ZeRO-Infinity and MemAscend.
    RECOMPUTE_SWAP_INPUT = "recompute_swap_input"
    KEEP = "keep"  # all tensors that autograd saves stay on the device
    SWAP = "swap"  # all tensors that autograd saves go to the store

    def of_layers(self, num_layers: int) -> tuple[BlockActivations, ...]:
        """Returns the policy of each layer, for a placement."""
        return (_CHOICES[self],) * num_layers


_CHOICES = {
    ActivationChoice.RECOMPUTE: RECOMPUTE_ALL,
    ActivationChoice.RECOMPUTE_SWAP_INPUT: BlockActivations(swap_input=True),
    ActivationChoice.KEEP: BlockActivations(recompute=False),
    ActivationChoice.SWAP: BlockActivations(recompute=False, swap_input=True, swapped=frozenset({EVERY_OPERATOR})),
}


def in_words(choice: BlockActivations) -> str:
    """Returns a policy's name, or its full description if it has none."""
    return next((name.value for name, named in _CHOICES.items() if named == choice), str(choice))
