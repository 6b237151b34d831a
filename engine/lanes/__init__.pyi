"""The lanes of a step: the micro-batches whose gradients are summed together."""

from windlass.engine.lanes.lane_division import LaneDivision as LaneDivision
from windlass.engine.lanes.lane_division import rounded_to_lanes as rounded_to_lanes
