"""Chooses how many transfers may be in flight, by the rates of the SSDs and of what they feed."""

import math

from windlass.engine.memory_plan import FETCH_DEPTH, STAGED_ACTIVATIONS, STATE_DEPTH, QueueDepths
from windlass.planner.cost import Speeds

# What wants SSDs wants one that is busy with something else as often as not: so many times as much as would keep all of
# them busy if each had its share at every moment.
_SPARE = 2


def depths_of(
    speeds: Speeds, *, param_nbytes: int, part_slots: int, slot_nbytes: int, num_optimizers: int
) -> QueueDepths:
    """So deep that the SSDs, or what they feed, are always busy: what is moved a second, for as long as one takes.

    `param_nbytes`: of a chunk. Activations go to the SSDs in parts of `part_slots` slots of `slot_nbytes`.
    """
    num_ssds, part_nbytes = speeds.num_ssds, part_slots * slot_nbytes
    # An update is far shorter than the way of its chunk's states from the SSD and to it.
    states = -(-_SPARE * num_ssds // num_optimizers) + 1
    # Each SSD moves one part while it is asked for the next, and one is copied each way.
    parts = max(
        2 * num_ssds + 2,
        _in_flight(num_ssds, part_nbytes / speeds.ssd_write_bytes, part_nbytes / speeds.d2h_bytes),
        _in_flight(num_ssds, part_nbytes / speeds.ssd_read_bytes, part_nbytes / speeds.h2d_bytes),
    )
    params = _in_flight(num_ssds, param_nbytes / speeds.ssd_read_bytes, param_nbytes / speeds.h2d_bytes)
    return QueueDepths(
        params=max(FETCH_DEPTH, params),
        states=max(STATE_DEPTH, states),
        staged_activations=max(STAGED_ACTIVATIONS, parts * part_slots),
    )


def _in_flight(num_ssds: int, ssd_s: float, link_s: float) -> int:
    """Things that must be on their way, each at one of the SSDs and then on the link, for one of both to be busy."""
    return _SPARE * math.ceil(min(num_ssds / ssd_s, 1 / link_s) * (ssd_s + link_s))
