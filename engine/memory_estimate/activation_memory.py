"""How much room a choice of activations needs, found by shapes alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from windlass.engine.activations import LentParams, SwapCounts, SwapHandle, Unit
from windlass.engine.memory_plan import BlockActivations
from windlass.engine.model import BlockRunner
from windlass.storage.ids import BlockIndex


class ActivationNeedUnknownError(RuntimeError):
    """A layer cannot be gone through by shapes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationNeed:
    """What a store must have room for at once."""

    nbytes: int = 0  # of the tensors
    num_slots: int = 0  # each put begins a new one

    def plus(self, other: "ActivationNeed") -> "ActivationNeed":
        """Both at once."""
        return ActivationNeed(nbytes=self.nbytes + other.nbytes, num_slots=self.num_slots + other.num_slots)

    def or_more(self, other: "ActivationNeed") -> "ActivationNeed":
        """One or the other."""
        return ActivationNeed(nbytes=max(self.nbytes, other.nbytes), num_slots=max(self.num_slots, other.num_slots))


def activation_need(
    runner: BlockRunner, choices: Sequence[BlockActivations], shapes: Sequence[tuple[int, int]], slot_nbytes: int
) -> ActivationNeed:
    """The most that is swapped at once in a step, with one of `choices` for each layer; nothing is computed.

    `shapes`: (examples, tokens) of the micro-batches that go forward before the first of them goes backward. The
    runner's own choices do not matter; no params may be installed. Exact; in layers with Python autograd functions the
    first step needs less.

    Raises:
        ActivationNeedUnknownError: a layer has operators whose output shapes torch does not know without computing, or
            a Python autograd function that starts kernels of its own.
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
    """A store that holds nothing, and knows how much it would."""

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
    """What one unit puts in its forward pass, and what of it stays until its backward pass."""
    has_function = False
    while True:
        scales = _Scales(slot_nbytes)
        # Of params nothing is swapped, whether they are known to be some or not.
        unit = Unit(choice, scales, LentParams(), copies=has_function)
        try:
            with runner.imagined(block, *shape) as (layer, entering):
                unit.forward(layer, entering)
        except Exception as error:
            raise ActivationNeedUnknownError(
                f"how much room the activations of block {block} need is not known before they are computed: "
                f"{type(error).__name__}: {error}"
            ) from error
        if unit.has_function == has_function:
            return scales
        has_function = True  # which a runner knows from the second micro-batch on
