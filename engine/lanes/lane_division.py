"""Deals the micro-batches of a step to lanes, whose gradients are summed separately.

Each lane is summed in order in fp32. Then the lanes are added, the first one first. So a gradient's bits depend on the
number of lanes, and not on the processes that compute them.
"""

import functools
from dataclasses import dataclass


def rounded_to_lanes(num_microbatches: int, num_lanes: int) -> int:
    """Returns the smallest number from `num_microbatches` on with which all lanes have equally many micro-batches."""
    return -(-num_microbatches // num_lanes) * num_lanes


@dataclass(frozen=True, slots=True)
class LaneDivision:
    """The division of a full step's micro-batches into lanes. Each lane has successive micro-batches.

    A step with fewer examples than micro-batches has fewer micro-batches. Then the last lanes have fewer or none, and a
    lane without micro-batches adds nothing.
    """

    num_lanes: int
    num_microbatches: int  # of a full step

    def __post_init__(self) -> None:
        """Refuses lanes that would always be empty."""
        if not 1 <= self.num_lanes <= self.num_microbatches:
            raise ValueError(
                f"lanes is {self.num_lanes}, and a step has {self.num_microbatches} micro-batches: it must be at "
                "least 1, and each lane needs a micro-batch"
            )

    def microbatches(self, lane: int) -> range:
        """Returns the micro-batches of a lane."""
        return range(self._start(lane), self._start(lane + 1))

    def lane_of(self, microbatch: int) -> int:
        """Returns the lane of a micro-batch."""
        return -(-(microbatch + 1) * self.num_lanes // self.num_microbatches) - 1

    def ends_lane(self, microbatch: int) -> bool:
        """Returns whether a micro-batch is the last of its lane."""
        return self._start(self.lane_of(microbatch) + 1) == microbatch + 1

    def needs_lane_sum(self, stop: int) -> bool:
        """Returns whether a micro-batch before `stop` needs a sum beside the total. The first lane's is the total."""
        return self.lane_of(stop - 1) > 0

    def has_open_lane(self, stop: int) -> bool:
        """Returns whether a cut before micro-batch `stop` leaves a lane's sum beside the total of those before."""
        return stop < self.num_microbatches and self.lane_of(stop - 1) == self.lane_of(stop) > 0

    def num_added_lanes(self, start: int, stop: int) -> int:
        """Returns the number of lanes that are added to the total after micro-batches from `start` to `stop`."""
        return sum(self.ends_lane(microbatch) for microbatch in range(start, stop) if self.lane_of(microbatch) > 0)

    def num_open_lanes(self, group_size: int) -> int:
        """Returns how often a step in groups of this size passes on the sum of an unfinished lane."""
        if self.num_lanes == 1:
            return 0
        return sum(self.has_open_lane(stop) for stop in range(group_size, self.num_microbatches, group_size))

    @property
    def has_long_lane(self) -> bool:
        """True if a lane behind the first one has several micro-batches, so that its sum is continued."""
        return any(len(self.microbatches(lane)) > 1 for lane in range(1, self.num_lanes))

    def most_lanes_in_group(self, group_size: int) -> int:
        """Returns the most lanes that end in one group, if groups have this size."""
        starts = range(0, self.num_microbatches, group_size)
        stops = (min(start + group_size, self.num_microbatches) for start in starts)
        return max(sum(map(self.ends_lane, range(*group))) for group in zip(starts, stops, strict=True))

    @property
    def smallest_uncut_group(self) -> int:
        """The size of the smallest groups of which none passes on the sum of an unfinished lane."""
        return _smallest_uncut_group(self)

    def _start(self, lane: int) -> int:
        return lane * self.num_microbatches // self.num_lanes


@functools.cache
def _smallest_uncut_group(division: LaneDivision) -> int:
    """See LaneDivision. A search for a plan asks for it with each option, and a step may have thousands of sizes."""
    num = division.num_microbatches
    return next(size for size in range(1, num + 1) if not any(map(division.has_open_lane, range(size, num, size))))
