"""Chooses how many transfers may be in flight, from the rates of the SSDs, the links and the optimizers."""

import math

from windlass.engine.memory_plan import FETCH_DEPTH, STAGED_ACTIVATIONS, STATE_DEPTH, QueueDepths
from windlass.planner.cost import Speeds

# Factor over the number of transfers that would keep all SSDs busy if each always had its share. About half of the
# transfers wait for an SSD that is busy with another one.
_SPARE = 2


def depths_of(
    speeds: Speeds, *, param_nbytes: int, part_slots: int, slot_nbytes: int, num_optimizers: int
) -> QueueDepths:
    """Returns depths at which either the SSDs or the links behind them are always busy.

    A depth is throughput times latency of one transfer. `param_nbytes`: params of a chunk. Activations move in parts of
    `part_slots` slots of `slot_nbytes`.
    """
    num_ssds, part_nbytes = speeds.num_ssds, part_slots * slot_nbytes
    # An update is far shorter than reading and writing its chunk's states.
    states = -(-_SPARE * num_ssds // num_optimizers) + 1
    # For each SSD one part in transfer and one queued, and one part copied in each direction.
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
    """Returns the number of transfers that keeps the SSDs or the link busy. Each one uses first one, then the other."""
    return _SPARE * math.ceil(min(num_ssds / ssd_s, 1 / link_s) * (ssd_s + link_s))
