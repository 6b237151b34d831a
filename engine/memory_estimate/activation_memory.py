"""Estimates the store size that a choice of activations needs, from shapes alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from windlass.engine.activations import BorrowedParams, SwapCounts, SwapHandle, Unit
from windlass.engine.memory_plan import BlockActivations
from windlass.engine.model import BlockRunner
from windlass.storage.ids import BlockIndex


class ActivationNeedUnknownError(RuntimeError):
    """A layer cannot be run by shapes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationNeed:
    """The capacity that a store needs."""

    nbytes: int = 0  # of the tensors
    num_slots: int = 0  # each put starts a new slot

    def plus(self, other: "ActivationNeed") -> "ActivationNeed":
        """Returns the capacity for both at the same time."""
        return ActivationNeed(nbytes=self.nbytes + other.nbytes, num_slots=self.num_slots + other.num_slots)

    def or_more(self, other: "ActivationNeed") -> "ActivationNeed":
        """Returns the capacity for either one at a time."""
        return ActivationNeed(nbytes=max(self.nbytes, other.nbytes), num_slots=max(self.num_slots, other.num_slots))


def activation_need(
    runner: BlockRunner, choices: Sequence[BlockActivations], shapes: Sequence[tuple[int, int]], slot_nbytes: int
) -> ActivationNeed:
    """Returns the peak of swapped activations in a step, without computing anything. The result is exact.

    In layers with Python autograd functions the first step needs less.

    Args:
        runner: the block runner, without installed params. Its own choices have no effect.
        choices: the choice for each layer.
        shapes: (examples, tokens) of the micro-batches that run forward before the first one runs backward.
        slot_nbytes: the slot size of the store.

    Raises:
        ActivationNeedUnknownError: a layer has operators whose output shapes torch cannot derive without computing, or
            a Python autograd function that launches its own kernels.
    """
    held = peak = ActivationNeed()
    for block, choice in enumerate(choices, start=1):
        if choice.swaps:
            units = {shape: _measure(runner, BlockIndex(block), choice, shape, slot_nbytes) for shape in set(shapes)}
            for shape in shapes:
                peak = peak.or_more(held.plus(units[shape].peak))
                held = held.plus(units[shape].held)
    return peak


class _Scales:
    """A store that holds nothing and only counts the bytes."""

    def __init__(self, slot_nbytes: int) -> None:
        self.held = self.peak = ActivationNeed()
        self._slot_nbytes = slot_nbytes
        self._num_puts = 0

    def put(self, tensor: torch.Tensor) -> SwapHandle:
        """See ActivationStore."""
        self._num_puts += 1
        self._hold(tensor.nbytes, 1)
        self.peak = self.peak.or_more(self.held)
        return SwapHandle(self._num_puts, tensor.nbytes)

    def drop(self, handle: SwapHandle) -> None:
        """See ActivationStore."""
        self._hold(handle.nbytes, -1)

    def prefetch(self, handle: SwapHandle) -> None:
        """See ActivationStore."""
        raise AssertionError("nothing goes backward here")

    def get(self, handle: SwapHandle) -> torch.Tensor:
        """See ActivationStore."""
        raise AssertionError("nothing goes backward here")

    @property
    def counts(self) -> SwapCounts:
        """See ActivationStore."""
        raise AssertionError("nothing was moved")

    def _hold(self, nbytes: int, sign: int) -> None:
        num_slots = -(-nbytes // self._slot_nbytes)
        self.held = self.held.plus(ActivationNeed(nbytes=sign * nbytes, num_slots=sign * num_slots))


def _measure(
    runner: BlockRunner, block: BlockIndex, choice: BlockActivations, shape: tuple[int, int], slot_nbytes: int
) -> _Scales:
    """Counts the bytes that one unit puts in its forward pass, and those that stay until its backward pass."""
    has_function = False
    while True:
        scales = _Scales(slot_nbytes)
        # An empty BorrowedParams is enough, because params are never swapped.
        unit = Unit(choice, scales, BorrowedParams(), copies=has_function)
        try:
            with runner.fake_layer(block, *shape) as (layer, entering):
                unit.forward(layer, entering)
        except Exception as error:
            raise ActivationNeedUnknownError(
                f"how much room the activations of block {block} need is not known before they are computed: "
                f"{type(error).__name__}: {error}"
            ) from error
        if unit.has_function == has_function:
            return scales
        has_function = True  # repeated, because a runner knows this from the second micro-batch on
