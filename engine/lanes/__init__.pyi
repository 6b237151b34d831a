"""The lanes of a step: the micro-batches whose gradients are summed together."""

from windlass.engine.lanes.lane_division import LaneDivision as LaneDivision
