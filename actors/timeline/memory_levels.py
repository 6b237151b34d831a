"""The memory in use over time, for each tier and each kind of data."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from windlass.engine.memory_plan import MemoryTier


class Level(NamedTuple):
    """The bytes that one kind of data uses in a tier over time; constant from each point to the next."""

    tier: MemoryTier
    what: str  # the kind of data
    allocated_nbytes: int | None  # bytes allocated for it at all times, used or not; None: none
    points: tuple[tuple[float, int], ...]  # (time_s, bytes in use from then on), in order

    def between(self, start_s: float, end_s: float) -> "Level":
        """Returns the part from `start_s` until before `end_s`. Its first point has the bytes in use at `start_s`."""
        first, stop = (bisect_right(self.points, at_s, key=lambda point: point[0]) for at_s in (start_s, end_s))
        before = self.points[first - 1][1] if first else 0
        return self._replace(points=((start_s, before), *self.points[first:stop]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMemory:
    """The combined levels of a tier."""

    allocated_nbytes: int | None  # for all kinds together; None if a kind has no allocation
    peak_nbytes: int  # largest number of bytes in use at once
    timeline: Sequence[tuple[float, Mapping[str, int]]]  # (time_s, bytes in use by kind from then on), in order


def memory_of(levels: Iterable[Level]) -> dict[MemoryTier, TierMemory]:
    """Combines levels of the same period by tier. Changes at the same moment become one change."""
    by_tier: dict[MemoryTier, list[Level]] = {}
    for level in levels:
        by_tier.setdefault(level.tier, []).append(level)
    return {tier: _together(by_tier[tier]) for tier in MemoryTier if tier in by_tier}


def _together(levels: Sequence[Level]) -> TierMemory:
    changes = sorted((at_s, i, nbytes) for i, level in enumerate(levels) for at_s, nbytes in level.points)
    now = {level.what: 0 for level in levels}
    timeline: list[tuple[float, Mapping[str, int]]] = []
    for at_s, i, nbytes in changes:
        now = {**now, levels[i].what: nbytes}
        if timeline and timeline[-1][0] == at_s:
            timeline.pop()
        timeline.append((at_s, now))
    allocated = [level.allocated_nbytes for level in levels if level.allocated_nbytes is not None]
    return TierMemory(
        allocated_nbytes=sum(allocated) if len(allocated) == len(levels) else None,
        peak_nbytes=max((sum(by_kind.values()) for _, by_kind in timeline), default=0),
        timeline=timeline,
    )
