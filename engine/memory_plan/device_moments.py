"""Computes the peak of a job's device memory from the needs of its operations. All sizes are in bytes.

Some memory is allocated at setup and stays: buffers for params and gradients, and states resident on the device. The
rest changes during a step. A moment is one operation on one micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from windlass.amounts import bytes_text, describe_largest
from windlass.engine.memory_plan.allocator_reserve import reserved_nbytes


class Pass(StrEnum):
    """The pass that a block is in at a moment."""

    FORWARD = "forward"
    HEAD = "head"  # forward and backward in one operation
    BACKWARD = "backward"
    EVALUATE = "evaluate"  # forward without holding activations, also for the head


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitNeed:
    """The needs of the embedding or of a layer, for one micro-batch. Peaks exclude memory in use before the pass."""

    output_nbytes: int  # the hidden state that it returns; its gradient has the same size
    held_nbytes: int  # on the device between its forward and its backward pass, without its output
    swapped: tuple[int, ...]  # size of each tensor that is off the device between its forward and its backward pass
    forward_peak_nbytes: int
    backward_peak_nbytes: int


NO_NEED = UnitNeed(output_nbytes=0, held_nbytes=0, swapped=(), forward_peak_nbytes=0, backward_peak_nbytes=0)


class MomentNeed(NamedTuple):
    """The memory that a step uses on the device at a moment."""

    held_nbytes: int  # activations of units before their backward pass
    hidden_nbytes: int  # hidden states between two blocks, and gradients of them
    returning_nbytes: int  # swapped activations of this unit and the next that are back or have memory reserved
    leaving_nbytes: int  # upper bound of swapped activations still on the device; copying may be faster
    operation_nbytes: int  # the operation's own peak

    @property
    def nbytes(self) -> int:
        """The sum of all parts."""
        return self.settled_nbytes + self.leaving_nbytes

    @property
    def settled_nbytes(self) -> int:
        """The sum of all parts except activations that are leaving the device."""
        return self.held_nbytes + self.hidden_nbytes + self.returning_nbytes + self.operation_nbytes


class Moment(NamedTuple):
    """A point of a step: one operation on one micro-batch."""

    direction: Pass
    block: int
    microbatch: int  # index in its group


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNeed:
    """The peak of a job's device memory, by purpose."""

    params_nbytes: int  # buffers for params, of whole blocks and of pieces
    grads_nbytes: int  # buffers in which gradients are summed and from which they are copied out
    states_nbytes: int  # states resident on the device
    constants_nbytes: int  # the model's own constants, and a group's token ids and targets
    activations: MomentNeed  # at the worst moment
    moment: Moment  # the worst moment
    settled_activations_nbytes: int  # at the worst moment if swapped activations left the device at once
    # Activations of groups that wait for another box, and hidden states from and to other boxes.
    waiting_nbytes: int = 0

    @property
    def lasting_nbytes(self) -> int:
        """The memory that is in use at all times."""
        lasting = (self.params_nbytes, self.grads_nbytes, self.states_nbytes, self.constants_nbytes)
        return sum(lasting) + self.waiting_nbytes

    def in_words(self, *, on_gpu: bool = False) -> str:
        """Describes the largest parts with their sizes, and on a GPU the allocator's reserve."""
        activations, moment = self.activations, self.moment
        passes = {
            Pass.FORWARD: f"the forward pass of block {moment.block}",
            Pass.HEAD: "the logits of the head and their gradients",
            Pass.BACKWARD: f"the backward pass of block {moment.block}",
            Pass.EVALUATE: f"the evaluation of block {moment.block}",
        }
        parts = {
            "params in flight": self.params_nbytes,
            "gradients": self.grads_nbytes,
            "states that rest there": self.states_nbytes,
            "the model's constants and the batch": self.constants_nbytes,
            "activations that wait for the backward pass": activations.held_nbytes,
            "activations that wait for other boxes": self.waiting_nbytes,
            "hidden states between blocks": activations.hidden_nbytes,
            "swapped activations on their way": activations.returning_nbytes + activations.leaving_nbytes,
            passes[moment.direction]: activations.operation_nbytes,
        }
        reserve = f", and the reserve of PyTorch's allocator {bytes_text(self.reserved_nbytes - self.nbytes)}"
        return describe_largest(parts) + (reserve if on_gpu else "")

    @property
    def nbytes(self) -> int:
        """The upper bound of the peak."""
        return self.lasting_nbytes + self.activations.nbytes

    @property
    def reserved_nbytes(self) -> int:
        """The memory that PyTorch's allocator takes from a GPU for that peak."""
        return reserved_nbytes(self.nbytes)

    @property
    def settled_nbytes(self) -> int:
        """The peak if copies to the host keep up with swapping."""
        return self.lasting_nbytes + self.settled_activations_nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMoments:
    """The needs at all moments of a group of micro-batches, in order: forward, head, backward.

    They are arrays with one element for each moment, because a group may have thousands.
    """

    num_blocks: int  # the embedding and the layers
    num_microbatches: int
    held_nbytes: "np.ndarray"
    hidden_nbytes: "np.ndarray"
    returning_nbytes: "np.ndarray"
    leaving_nbytes: "np.ndarray"
    operation_nbytes: "np.ndarray"

    def __iter__(self) -> Iterator[tuple[Moment, MomentNeed]]:
        """Yields each moment with its need."""
        return map(self._at, range(len(self.held_nbytes)))

    @property
    def worst(self) -> tuple[Moment, MomentNeed]:
        """The first moment with the largest need, and that need."""
        return self._at(int((self._settled_nbytes + self.leaving_nbytes).argmax()))

    @property
    def most_settled_nbytes(self) -> int:
        """The largest need without activations that are leaving the device."""
        return int(self._settled_nbytes.max())

    @property
    def _settled_nbytes(self) -> "np.ndarray":
        nbytes: np.ndarray = self.held_nbytes + self.hidden_nbytes + self.returning_nbytes + self.operation_nbytes
        return nbytes

    def _at(self, index: int) -> tuple[Moment, MomentNeed]:
        need = MomentNeed(
            held_nbytes=int(self.held_nbytes[index]),
            hidden_nbytes=int(self.hidden_nbytes[index]),
            returning_nbytes=int(self.returning_nbytes[index]),
            leaving_nbytes=int(self.leaving_nbytes[index]),
            operation_nbytes=int(self.operation_nbytes[index]),
        )
        row, microbatch = divmod(index, self.num_microbatches)  # a row for each block, the head, and each block again
        direction = Pass.FORWARD if row < self.num_blocks else Pass.HEAD if row == self.num_blocks else Pass.BACKWARD
        block = row if row <= self.num_blocks else 2 * self.num_blocks - row
        return Moment(direction=direction, block=block, microbatch=microbatch), need


def step_moments(
    units: Sequence[Sequence[UnitNeed]],
    head_peaks: Sequence[int],
    *,
    leaving_nbytes: int,
    has_ssd_store: bool = False,
) -> StepMoments:
    """Returns the need at each moment of a group of micro-batches.

    Args:
        units: the needs of the embedding and of each layer, per micro-batch.
        head_peaks: the peaks of the head, per micro-batch; at least one.
        leaving_nbytes: the plan's limit of swapped activations that are still on the device.
        has_ssd_store: swapped activations go to SSDs when host memory is full.
    """
    limit = leaving_limit(units, leaving_nbytes, has_ssd_store=has_ssd_store)
    different = {id(unit): unit for row in units for unit in row}  # most are one object
    numbers = {
        key: (
            unit.held_nbytes,
            unit.output_nbytes,
            sum(unit.swapped),
            unit.forward_peak_nbytes,
            unit.backward_peak_nbytes,
        )
        for key, unit in different.items()
    }
    table = np.array([[numbers[id(unit)] for unit in row] for row in units], dtype=np.int64)
    held, output, swapped, forward_peaks, backward_peaks = np.moveaxis(table, -1, 0)  # (blocks, micro-batches)
    # At the end of a unit its input is freed, or is counted as held.
    hidden = np.diff(output, axis=0, prepend=0)
    put = swapped.ravel().cumsum()
    returning = np.append(swapped[::-1].ravel(), 0)
    # The embedding's held memory stays until the whole group is over.
    released = np.concatenate([held[:0:-1], np.zeros_like(held[:1])])
    num_heads = len(head_peaks)
    return StepMoments(
        num_blocks=len(units),
        num_microbatches=num_heads,
        held_nbytes=np.concatenate(
            [_before(held), np.full(num_heads, held.sum()), held.sum() - _before(released)],
        ),
        hidden_nbytes=np.concatenate(
            [_before(hidden), np.full(num_heads, hidden.sum()), hidden.sum() - _before(hidden[::-1])]
        ),
        returning_nbytes=np.concatenate(
            [np.zeros_like(put), np.full(num_heads, returning[0]), returning[:-1] + returning[1:]]
        ),
        leaving_nbytes=np.minimum(np.concatenate([put, np.full(num_heads + len(put), put[-1])]), limit),
        operation_nbytes=np.concatenate(
            [forward_peaks.ravel(), np.array(head_peaks, dtype=np.int64), backward_peaks[::-1].ravel()]
        ),
    )


def _before(added: "np.ndarray") -> "np.ndarray":
    """Returns the sum of all elements before each one."""
    flat = added.ravel()
    before: np.ndarray = flat.cumsum() - flat
    return before


def evaluation_moments(
    units: Sequence[Sequence[UnitNeed]], head_peaks: Sequence[int]
) -> Iterator[tuple[Moment, MomentNeed]]:
    """Yields the need at each moment of a group of micro-batches of an evaluation.

    The inputs of a layer stay until all micro-batches have passed it.
    """
    held = hidden = 0

    def at(block: int, microbatch: int, operation_nbytes: int) -> tuple[Moment, MomentNeed]:
        return Moment(direction=Pass.EVALUATE, block=block, microbatch=microbatch), MomentNeed(
            held_nbytes=held,
            hidden_nbytes=hidden,
            returning_nbytes=0,
            leaving_nbytes=0,
            operation_nbytes=operation_nbytes,
        )

    for block, row in enumerate(units):
        for m, unit in enumerate(row):
            yield at(block, m, unit.forward_peak_nbytes)
            held += unit.held_nbytes
            hidden += unit.output_nbytes
        if block:
            hidden -= sum(unit.output_nbytes for unit in units[block - 1])
    for m, peak in enumerate(head_peaks):
        yield at(len(units), m, peak)
        hidden -= units[-1][m].output_nbytes


def leaving_limit(units: Sequence[Sequence[UnitNeed]], leaving_nbytes: int, *, has_ssd_store: bool) -> int:
    """Returns the largest number of swapped bytes that may still be on the device. A store always accepts one tensor.

    With SSDs there are two stores with half of the limit each, and a tensor for the SSDs is freed only as a whole.
    """
    largest = max((nbytes for row in units for unit in row for nbytes in unit.swapped), default=0)
    if not has_ssd_store:
        return max(leaving_nbytes, largest)
    return 2 * max(leaving_nbytes // 2, largest) + largest
