"""How much device memory a job needs at its peak, from what each of its operations needs. All sizes are in bytes.

What a job makes at set-up stays: buffers for params and gradients, states that rest on the device. What a step adds
changes from moment to moment; a moment is one operation's work for one micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from windlass.amounts import describe_largest


class Pass(StrEnum):
    """What is done with a block at a moment."""

    FORWARD = "forward"
    HEAD = "head"  # goes forward and backward at once
    BACKWARD = "backward"
    EVALUATE = "evaluate"  # forward, and nothing is held; the head too


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitNeed:
    """The embedding or a layer, for one micro-batch. A peak is beyond what was alive before that pass began."""

    output_nbytes: int  # the hidden state that leaves it; the gradient that comes back takes the same
    held_nbytes: int  # on the device from the end of its forward pass to its backward pass, its output aside
    swapped: tuple[int, ...]  # what leaves the device in its forward pass and is back before its backward pass begins
    forward_peak_nbytes: int
    backward_peak_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentNeed:
    """What a step has on the device at a moment."""

    held_nbytes: int  # by units whose backward pass is to come
    hidden_nbytes: int  # hidden states between two blocks, and gradients of them
    returning_nbytes: int  # of this unit and the next: back, or with memory to come back to
    leaving_nbytes: int  # swapped, and at most so much of it still there: how much depends on how fast it is copied
    operation_nbytes: int  # the operation's own peak

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.settled_nbytes + self.leaving_nbytes

    @property
    def settled_nbytes(self) -> int:
        """All but what is leaving."""
        return self.held_nbytes + self.hidden_nbytes + self.returning_nbytes + self.operation_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where in a step."""

    direction: Pass
    block: int
    microbatch: int  # of its group


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNeed:
    """A job's peak, by what takes it."""

    params_nbytes: int  # buffers that params come to, whole blocks and pieces of them
    grads_nbytes: int  # buffers that gradients are summed in, and leave from
    states_nbytes: int  # that rest on the device
    constants_nbytes: int  # the model's own constants, and a group's token ids and targets
    activations: MomentNeed  # at the worst moment,
    moment: Moment  # which is this one
    settled_activations_nbytes: int  # at the worst moment if whatever is swapped left the device at once

    @property
    def lasting_nbytes(self) -> int:
        """What is there at all times."""
        return self.params_nbytes + self.grads_nbytes + self.states_nbytes + self.constants_nbytes

    def in_words(self) -> str:
        """The parts that take most, and what each takes."""
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
            "hidden states between blocks": activations.hidden_nbytes,
            "swapped activations on their way": activations.returning_nbytes + activations.leaving_nbytes,
            passes[moment.direction]: activations.operation_nbytes,
        }
        return describe_largest(parts)

    @property
    def nbytes(self) -> int:
        """The most that there can be."""
        return self.lasting_nbytes + self.activations.nbytes

    @property
    def settled_nbytes(self) -> int:
        """The most that there is where copies keep up with what is swapped."""
        return self.lasting_nbytes + self.settled_activations_nbytes


def step_moments(
    units: Sequence[Sequence[UnitNeed]],
    head_peaks: Sequence[int],
    *,
    leaving_nbytes: int,
    has_ssd_store: bool = False,
) -> Iterator[tuple[Moment, MomentNeed]]:
    """What each moment of a group of micro-batches needs, in their order.

    `units`: of the embedding and of each layer, per micro-batch; `head_peaks`: of the head, per micro-batch.
    `leaving_nbytes`: of what was swapped, the plan's limit on what still lies on the device. `has_ssd_store`: swapped
    activations go on to SSDs where host memory is full.
    """
    limit = leaving_limit(units, leaving_nbytes, has_ssd_store=has_ssd_store)
    held = hidden = put = 0

    def need(operation_nbytes: int, returning_nbytes: int = 0) -> MomentNeed:
        return MomentNeed(
            held_nbytes=held,
            hidden_nbytes=hidden,
            returning_nbytes=returning_nbytes,
            leaving_nbytes=min(put, limit),
            operation_nbytes=operation_nbytes,
        )

    for block, row in enumerate(units):
        for m, unit in enumerate(row):
            put += sum(unit.swapped)
            yield Moment(direction=Pass.FORWARD, block=block, microbatch=m), need(unit.forward_peak_nbytes)
            held += unit.held_nbytes
            # What entered is gone, or counted as held.
            hidden += unit.output_nbytes - (units[block - 1][m].output_nbytes if block else 0)
    returning = [sum(unit.swapped) for row in reversed(units) for unit in row] + [0]
    for m, peak in enumerate(head_peaks):
        yield Moment(direction=Pass.HEAD, block=len(units), microbatch=m), need(peak, returning[0])
    backward = [(block, m) for block in reversed(range(len(units))) for m in range(len(head_peaks))]
    for i, (block, m) in enumerate(backward):
        unit, moment = units[block][m], Moment(direction=Pass.BACKWARD, block=block, microbatch=m)
        yield moment, need(unit.backward_peak_nbytes, returning[i] + returning[i + 1])
        if block:  # what the embedding holds is needed until all of the group is over
            held -= unit.held_nbytes
            hidden += units[block - 1][m].output_nbytes
        hidden -= unit.output_nbytes


def evaluation_moments(
    units: Sequence[Sequence[UnitNeed]], head_peaks: Sequence[int]
) -> Iterator[tuple[Moment, MomentNeed]]:
    """As `step_moments`, for a group of micro-batches of an evaluation.

    What enters a layer stays until all micro-batches are through it.
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
    """Of what was swapped, the most that may lie on the device yet. One tensor is always let through.

    With SSDs there are two stores, each with half of the room; what goes to the SSDs is let go of as a whole.
    """
    largest = max((nbytes for row in units for unit in row for nbytes in unit.swapped), default=0)
    if not has_ssd_store:
        return max(leaving_nbytes, largest)
    return 2 * max(leaving_nbytes // 2, largest) + largest
