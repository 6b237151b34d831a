"""The parts of a step's time, and the sums of them that bound the step."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from windlass.engine.memory_plan import UpdateOrder


class Part(IntEnum):
    """A part of a step's time. The link has two directions. Each SSD does one transfer at a time."""

    FORWARD = 0  # compute, with the head's forward and backward
    BACKWARD = 1
    H2D_FORWARD = 2
    H2D_BACKWARD = 3
    D2H_FORWARD = 4
    D2H_BACKWARD = 5
    SSD_FORWARD = 6  # reads of params, writes of activations
    SSD_BACKWARD = 7  # reads of params and activations, writes of kept gradients
    SSD_UPDATE = 8  # reads and writes of states in an optimizer's slots
    OPTIMIZER = 9
    FIRST_UPDATE = 10  # from the last gradient to the first block's new params; nothing computes meanwhile
    SSD_FLUSH = 11  # writes of states resident in memory, for a commit
    HOST_MEMORY = 12  # all that the other parts read and write in the host's memory, of all GPU workers
    # Of these, what passes that memory in the forward pass (with all updates, if these are over before the head), and
    # in the backward pass. Where updates may come in either, they are in neither.
    HOST_FORWARD = 13
    HOST_BACKWARD = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingUpdates:
    """The seconds of the updates whose gradients have room in host memory, at the resources of an update."""

    optimizer_s: float
    slots_s: float  # as the weights of `slots_of_updates` count them
    ssd_s: float


# They repeat what other parts count.
HOST_PARTS = (Part.HOST_MEMORY, Part.HOST_FORWARD, Part.HOST_BACKWARD)


def bounding_parts(
    head_s: float,
    slots_of_updates: dict[Part, float],
    *,
    order: UpdateOrder,
    ssd_cores: float | None,
    slowed_by_other_way: float,
    num_rounds: int,
    waiting: WaitingUpdates | None,
    copies_beside_s: float | None,
) -> Iterator[tuple[dict[Part, float], float]]:
    """Yields the weights of parts, and seconds to add, of each bound.

    `head_s`: of all micro-batches. `ssd_cores`: see `StepCosts`, if the device is the CPU. `slowed_by_other_way`:
    additional seconds of a transfer for each second in which the other direction of the link is busy. `num_rounds`:
    the groups of micro-batches that one GPU worker computes. `waiting`: the updates that may wait for the end of the
    backward pass; None: all. `copies_beside_s`: the backward pass waits while a gradient is copied out, but for so many
    seconds; None: it does not.
    """
    p = Part
    compute, ssd = (p.FORWARD, p.BACKWARD), (p.SSD_FORWARD, p.SSD_BACKWARD, p.SSD_UPDATE, p.SSD_FLUSH)
    h2d, d2h = (p.H2D_FORWARD, p.H2D_BACKWARD), (p.D2H_FORWARD, p.D2H_BACKWARD)
    for busy in (ssd, (p.OPTIMIZER,)):
        yield once(*busy), 0.0
    # In the best case, all transfers in the less busy direction overlap with the other direction.
    for way, other in ((h2d, d2h), (d2h, h2d)):
        yield once(*way) | dict.fromkeys(other, slowed_by_other_way), 0.0
    yield once(*compute, p.FIRST_UPDATE), 0.0
    if ssd_cores is not None:
        # Matrix products are split evenly over the cores: while one core does other work, all wait for it.
        yield once(*compute, *h2d, *d2h, p.OPTIMIZER) | dict.fromkeys(ssd, ssd_cores), 0.0
    of_forward = [p.FORWARD, p.D2H_FORWARD]
    of_backward: list[tuple[Part, ...]] = [_backward_compute(copies_beside_s), (p.H2D_BACKWARD,)]
    # Blocks needed first are updated first, so the head's update is the last. It cannot overlap with the head's
    # compute.
    updates = updates_of(order, slots_of_updates)
    # Updates end before the first group's head, and begin in the last group's backward pass. So they overlap with
    # nothing between the two.
    between = (num_rounds - 1) / num_rounds
    if order.keeps_grads:
        of_forward.append(p.H2D_FORWARD)
        of_backward += [(p.D2H_BACKWARD,), (p.SSD_BACKWARD,)]
    else:
        for update in updates:
            yield update | dict.fromkeys(compute, between), head_s / num_rounds
        if waiting is not None:
            yield from _held_back(waiting, slots_of_updates, between)
    for backward in of_backward:
        beside_s = _copies_beside(backward, copies_beside_s)
        for forward in of_forward:
            yield once(forward, *backward), -beside_s
        if order.keeps_grads:
            for update in updates:
                earlier = _of_earlier_forwards(between, backward)
                yield update | once(*backward) | earlier, head_s / num_rounds - beside_s
    if not order.overlaps_steps:
        # The next forward pass waits for all updates, and these wait for all gradients. So the three do not overlap.
        passes = itertools.product((*of_forward, p.SSD_FORWARD), of_backward)
        alone = (once(p.OPTIMIZER), once(p.SSD_UPDATE), slots_of_updates)
        for (forward, backward), update in itertools.product(passes, alone):
            yield update | once(forward, *backward), -_copies_beside(backward, copies_beside_s)


def host_bounding_parts(copies_beside_s: float | None) -> Iterator[tuple[dict[Part, float], float]]:
    """Yields the weights of parts, and seconds to add, of each bound by what passes the host's memory in one pass.

    They are for one GPU worker. `copies_beside_s`: see `bounding_parts`.
    """
    p, backward = Part, _backward_compute(copies_beside_s)
    yield once(p.HOST_FORWARD, *backward), -_copies_beside(backward, copies_beside_s)
    yield once(p.FORWARD, p.HOST_BACKWARD), 0.0


def _backward_compute(copies_beside_s: float | None) -> tuple[Part, ...]:
    return (Part.BACKWARD,) if copies_beside_s is None else (Part.BACKWARD, Part.D2H_BACKWARD)


def _copies_beside(backward: tuple[Part, ...], copies_beside_s: float | None) -> float:
    """Returns the seconds of copies that a bound with these parts counts, and for which no compute waits."""
    return copies_beside_s or 0.0 if backward == _backward_compute(copies_beside_s) else 0.0


def updates_of(order: UpdateOrder, slots_of_updates: dict[Part, float]) -> list[dict[Part, float]]:
    """Returns the weights of parts, for each resource that the updates of a step need: the longest one counts."""
    p = Part
    ssd = (p.SSD_UPDATE, p.SSD_FLUSH)
    return [once(p.OPTIMIZER), slots_of_updates, once(*(p.SSD_FORWARD, *ssd) if order.keeps_grads else ssd)]


def _of_earlier_forwards(between: float, backward: tuple[Part, ...]) -> dict[Part, float]:
    """Returns the compute of forward passes after the first group's, in which no update overlaps either."""
    return {Part.FORWARD: between} if between and Part.BACKWARD in backward else {}


def _held_back(
    waiting: WaitingUpdates, slots_of_updates: dict[Part, float], between: float
) -> Iterator[tuple[dict[Part, float], float]]:
    """Yields the bounds for gradients that hold the last group's backward pass back.

    When it ends, only as many gradients wait as have room. All other updates ran during that pass.
    """
    p = Part
    of_update = (
        (once(p.OPTIMIZER), waiting.optimizer_s),
        (slots_of_updates, waiting.slots_s),
        (once(p.SSD_UPDATE), waiting.ssd_s),
    )
    for update, waiting_s in of_update:
        for forward in (p.FORWARD, p.D2H_FORWARD):
            beside = {p.BACKWARD: between} if forward is p.FORWARD else {}
            yield update | once(forward) | beside, -waiting_s


def once(*parts: Part) -> dict[Part, float]:
    """Returns weights of 1 for these parts."""
    return dict.fromkeys(parts, 1.0)
