"""How much may be on its way at once. Deeper keeps more SSDs busy at a time, and takes memory."""

import math
from dataclasses import dataclass

from windlass.planner.speeds import Speeds

# Chunks of one block's params that may be on their way from the SSDs at once, beyond those being copied to the device.
FETCH_DEPTH = 4
# Chunks at one optimizer at once: one being read, one updated, one written back.
STATE_DEPTH = 3
MIN_STATE_DEPTH = 2
# Slots for activations on their way between the device and the SSDs: one is copied while others are read or written.
STAGED_ACTIVATIONS = 16
# Activations on their way out that may still lie on the device: what a link moves while a few layers are computed.
LEAVING_ACTIVATION_NBYTES = 512 * 2**20
# What wants SSDs wants one that is busy with something else as often as not: so many times as much as would keep all of
# them busy if each had its share at every moment.
_SPARE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """Of the buffers that things pass through."""

    params: int = FETCH_DEPTH  # chunks on their way from the SSDs
    states: int = STATE_DEPTH  # chunks at one optimizer; less where the budget is too small
    staged_activations: int = STAGED_ACTIVATIONS  # slots, of which there are no more than activations on the SSDs take
    leaving_nbytes: int = LEAVING_ACTIVATION_NBYTES  # activations on their way out that still lie on the device

    def __post_init__(self) -> None:
        for name, least in (("params", 1), ("states", 1), ("staged_activations", 1), ("leaving_nbytes", 0)):
            if (number := getattr(self, name)) < least:
                raise ValueError(f"depths: {name} is {number}; at least {least}, or nothing ever moves")


def depths_of(speeds: Speeds, *, param_nbytes: int, part_slots: int, slot_nbytes: int, num_optimizers: int) -> Depths:
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
    return Depths(
        params=max(FETCH_DEPTH, params),
        states=max(STATE_DEPTH, states),
        staged_activations=max(STAGED_ACTIVATIONS, parts * part_slots),
    )


def _in_flight(num_ssds: int, ssd_s: float, link_s: float) -> int:
    """Things that must be on their way, each at one of the SSDs and then on the link, for one of both to be busy."""
    return _SPARE * math.ceil(min(num_ssds / ssd_s, 1 / link_s) * (ssd_s + link_s))
