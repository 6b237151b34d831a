"""What is in use of each tier's memory over time: levels, of which there is one for each kind of things."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Tier(StrEnum):
    """Of memory, as plans name it."""

    GPU = "gpu"  # the device, also where that is the CPU
    HOST = "host"
    SSD = "ssd"


class Level(NamedTuple):
    """Bytes that one kind of things takes of a tier; constant from each point to the next."""

    tier: Tier
    what: str
    allocated_nbytes: int | None  # set aside for it at all times, used or not; None: nothing is
    points: tuple[tuple[float, int], ...]  # (time_s, bytes in use from then on), in order

    def between(self, start_s: float, end_s: float) -> "Level":
        """The same from one time until before another; what was in use at the first one is its first point."""
        first, stop = (bisect_right(self.points, at_s, key=lambda point: point[0]) for at_s in (start_s, end_s))
        before = self.points[first - 1][1] if first else 0
        return self._replace(points=((start_s, before), *self.points[first:stop]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMemory:
    """All that is known of a tier's levels."""

    allocated_nbytes: int | None  # for all kinds together; None: not for all of them
    peak_nbytes: int  # the most that is in use at once
    timeline: Sequence[tuple[float, Mapping[str, int]]]  # (time_s, bytes in use by kind from then on), in order


def memory_of(levels: Iterable[Level]) -> dict[Tier, TierMemory]:
    """Levels of the same time, put together. What changes at one moment is one change."""
    by_tier: dict[Tier, list[Level]] = {}
    for level in levels:
        by_tier.setdefault(level.tier, []).append(level)
    return {tier: _together(by_tier[tier]) for tier in Tier if tier in by_tier}


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
