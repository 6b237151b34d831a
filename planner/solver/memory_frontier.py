"""The assignments of a program that need least memory, for every division between device and host.

A program with millions of assignments has few that matter for memory: those on the lower convex hull of device bytes
against host bytes. They form a path, which begins where the device holds least. Each step moves one block to an option
that takes more of the device and less of the host. The steps that save most host bytes per device byte come first.

Source: the greedy method for multiple-choice knapsacks (Sinha and Zoltners, 1979).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from windlass.engine.memory_plan import MemoryTier
from windlass.planner.cost import Speeds
from windlass.planner.solver.family import bases_at_the_border, smallest_of
from windlass.planner.solver.planned_job import TIER_INDEX, Limits, PlannedJob
from windlass.planner.solver.program import Assignment, BlockGroup, Program, least_assignment, outcome_of
from windlass.planner.solver.step_cost import Kind, StepCosts

_Floats = npt.NDArray[np.float64]
_DEVICE, _HOST, _SSD = (TIER_INDEX[tier] for tier in MemoryTier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes on each tier: a need, or a limit. The device's are those of one GPU worker."""

    device: float
    host: float
    ssd: float

    def of(self, tier: MemoryTier) -> float:
        """Returns the bytes of a tier."""
        return {MemoryTier.DEVICE: self.device, MemoryTier.HOST: self.host, MemoryTier.SSD: self.ssd}[tier]

    def at_least(self, other: "Bytes") -> "Bytes":
        """Returns the larger bytes of each tier."""
        return Bytes(
            device=max(self.device, other.device), host=max(self.host, other.host), ssd=max(self.ssd, other.ssd)
        )

    def above(self, limits: "Bytes") -> "Bytes":
        """Returns the bytes of each tier above a limit."""
        return Bytes(
            device=max(0.0, self.device - limits.device),
            host=max(0.0, self.host - limits.host),
            ssd=max(0.0, self.ssd - limits.ssd),
        )

    def fits(self, limits: "Bytes") -> bool:
        """Returns whether every tier is within its limit."""
        return self.device <= limits.device and self.host <= limits.host and self.ssd <= limits.ssd


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step of a path: one block of a group changes its option."""

    group: int
    before: int  # an option, as `after`
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """The assignments after each number of steps."""

    first: tuple[int, ...]  # of each group, the option of all its blocks before the first step
    steps: tuple[_Step, ...]  # different ones, in order
    numbers: tuple[int, ...]  # how often each of them comes, one after the other
    bound_device: _Floats  # after each number of steps, in the mode of the path; ascending
    bound_host: _Floats  # descending
    counts_movable: bool  # in the bounds: else activations that may go to the SSDs take no host memory


def frontiers_of(job: PlannedJob, speeds: Speeds, limits: Limits) -> "Iterator[MemoryFrontier]":
    """Yields the frontiers of all ways to save memory, those that save most first, but those that cut matrices last.

    `limits` matter only to costs of plans made from them.
    """
    for base in bases_at_the_border(job, speeds, limits):
        if base.num_grad_buffers == 1:
            for overflows in (True, False):
                yield MemoryFrontier(smallest_of(base, overflows=overflows))


class MemoryFrontier:
    """The assignments of one program that need least memory. The limits of its costs do not matter."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.kinds: list[Kind] = costs.kinds()
        self._program = program = costs.program(self.kinds)
        self.base_ssd = program.nbytes[_SSD]
        self._paths = list(_paths(program))
        tables = [_table(program, path) for path in self._paths]
        self.device, self.host, self.movable = (np.concatenate(columns) for columns in zip(*tables, strict=True))
        self._starts = np.cumsum([0, *(sum(path.numbers) + 1 for path in self._paths)])
        if program.overflow is None:
            self.movable = np.zeros_like(self.movable)

    def needs(self, tier: MemoryTier, limits: Bytes) -> _Floats:
        """Returns the bytes of a tier that each assignment needs within the limits of the others; inf: it does not fit.

        Activations go to the SSDs as far as they must.
        """
        room = max(0.0, limits.ssd - self.base_ssd)
        if self.base_ssd > limits.ssd and tier is not MemoryTier.SSD:
            return np.full_like(self.device, np.inf)
        least_host = self.host - np.minimum(self.movable, np.inf if tier is MemoryTier.SSD else room)
        if tier is MemoryTier.HOST:
            return np.where(self.device <= limits.device, least_host, np.inf)
        fits_host = least_host <= limits.host
        if tier is MemoryTier.DEVICE:
            return np.where(fits_host, self.device, np.inf)
        moved = np.maximum(0.0, self.host - limits.host)
        return np.where(fits_host & (self.device <= limits.device), self.base_ssd + moved, np.inf)

    def prices(self, limits: Bytes, prices: Bytes) -> _Floats:
        """Returns the price of what each assignment needs above the limits. `prices`: of a byte of each tier."""
        moved = np.minimum(self.movable, np.maximum(0.0, self.host - limits.host))
        device, host = np.maximum(0.0, self.device - limits.device), np.maximum(0.0, self.host - moved - limits.host)
        ssd = np.maximum(0.0, self.base_ssd + moved - limits.ssd)
        price: _Floats = device * prices.device + host * prices.host + ssd * prices.ssd
        return price

    def bound(self, tier: MemoryTier, limits: Bytes) -> float:
        """Returns a lower bound of `needs` over all assignments of the program, also those that are on no path."""
        if self.base_ssd > limits.ssd and tier is not MemoryTier.SSD:
            return np.inf
        if tier is MemoryTier.DEVICE:
            return min(_at(path.bound_host[::-1], path.bound_device[::-1], limits.host) for path in self._paths)
        if tier is MemoryTier.HOST:
            return min(_at(path.bound_device, path.bound_host, limits.device) for path in self._paths)
        if self.bound(MemoryTier.HOST, replace(limits, ssd=np.inf)) > limits.host:
            return np.inf
        unmoved = min(
            _at(path.bound_device, path.bound_host, limits.device) for path in self._paths if path.counts_movable
        )
        return self.base_ssd + max(0.0, unmoved - limits.host)

    def moved(self, index: int, tier: MemoryTier, limits: Bytes) -> float:
        """Returns the activation bytes that an assignment moves to the SSDs, so that it needs least of a tier."""
        host, movable = float(self.host[index]), float(self.movable[index])
        room = np.inf if tier is MemoryTier.SSD else max(0.0, limits.ssd - self.base_ssd)
        surplus = np.inf if tier is MemoryTier.HOST else max(0.0, host - limits.host)
        return min(movable, room, surplus)

    def assignment(self, index: int, moved_nbytes: float) -> Assignment:
        """Returns an assignment by its index in the results of `needs`."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        path = self._paths[number]
        counts = [[0] * len(group.options) for group in self._program.blocks]
        for group, option in enumerate(path.first):
            counts[group][option] = self._program.blocks[group].count
        num_left = index - int(self._starts[number])
        for step, most in zip(path.steps, path.numbers, strict=True):
            num_steps = min(most, num_left)
            counts[step.group][step.before] -= num_steps
            counts[step.group][step.after] += num_steps
            num_left -= num_steps
        return Assignment(counts=tuple(map(tuple, counts)), moved_nbytes=moved_nbytes)

    def best_assignment(self, tier: MemoryTier, limits: Bytes) -> Assignment | None:
        """Returns the assignment that needs least of a tier, of all that are possible. Slower than `needs`."""
        elastic = [each for each in MemoryTier if each is tier or np.isinf(limits.of(each))]
        by_tier = (
            self._program.nbytes[TIER_INDEX[each]] if each in elastic else limits.of(each) for each in MemoryTier
        )
        program = replace(self._program, limits=tuple(by_tier))
        elastic_tiers = [TIER_INDEX[each] for each in elastic]
        return least_assignment(program, TIER_INDEX[tier], elastic=elastic_tiers)

    def nbytes(self, assignment: Assignment) -> Bytes:
        """Returns the bytes of an assignment, as the program counts them."""
        nbytes = outcome_of(self._program, assignment).nbytes
        return Bytes(device=nbytes[_DEVICE], host=nbytes[_HOST], ssd=nbytes[_SSD])


def _at(xs: _Floats, ys: _Floats, limit: float) -> float:
    """Interpolates a falling line at `limit`. `xs` ascend. Returns inf below the first x."""
    if limit < xs[0]:
        return np.inf
    return float(np.interp(limit, xs, ys))


def _paths(program: Program) -> Iterator[_Path]:
    """Yields a path for each mode: whether each buffer counts its bytes or is full, and whether movable bytes count.

    A buffer takes the smaller of the two, and movable bytes may go to the SSDs. So the smallest need is on one of them.
    """
    modes = itertools.product(*((False, True) for _ in program.buffers), (False, True) if program.overflow else (True,))
    for *full, counts_movable in modes:
        base = [program.nbytes[_DEVICE], program.nbytes[_HOST]]
        for buffer, is_full in zip(program.buffers, full, strict=True):
            base[buffer.tier] += buffer.most_nbytes if is_full else 0.0
        yield _path(program, base, full, counts_movable=counts_movable)


def _path(program: Program, base: list[float], full: Sequence[bool], *, counts_movable: bool) -> _Path:
    first: list[int] = []
    device, host = base
    slopes: list[tuple[float, int, int, float, float, _Step]] = []
    for number, group in enumerate(program.blocks):
        weights = _weights(program, group, full, counts_movable=counts_movable)
        hull = _hull(weights)
        first.append(hull[0])
        device += group.count * weights[hull[0]][0]
        host += group.count * weights[hull[0]][1]
        for place, (before, after) in enumerate(itertools.pairwise(hull)):
            more, less = weights[after][0] - weights[before][0], weights[before][1] - weights[after][1]
            slopes.append((more / less, number, place, more, less, _Step(group=number, before=before, after=after)))
    slopes.sort(key=lambda slope: slope[:3])
    numbers = [program.blocks[slope[1]].count for slope in slopes]
    return _Path(
        first=tuple(first),
        steps=tuple(slope[-1] for slope in slopes),
        numbers=tuple(numbers),
        bound_device=np.cumsum(np.append(device, np.repeat([slope[3] for slope in slopes], numbers))),
        bound_host=np.cumsum(np.append(host, np.repeat([-slope[4] for slope in slopes], numbers))),
        counts_movable=counts_movable,
    )


def _weights(
    program: Program, group: BlockGroup, full: Sequence[bool], *, counts_movable: bool
) -> list[tuple[float, float]]:
    """Returns the device bytes and the host bytes of each option in a mode."""
    weights = []
    for option in group.options:
        nbytes = [option.nbytes[_DEVICE], option.nbytes[_HOST]]
        for buffer, is_full, more in zip(program.buffers, full, option.buffered_nbytes, strict=False):
            nbytes[buffer.tier] += 0.0 if is_full else more
        if not counts_movable:
            nbytes[1] -= option.movable_nbytes
        weights.append((nbytes[0], nbytes[1]))
    return weights


def _hull(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the points of the lower left convex hull, from the smallest x to the smallest y."""
    hull: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        x, y = points[index]
        if hull and y >= points[hull[-1]][1]:
            continue  # an option with no larger x has no larger y
        while len(hull) > 1:
            (x0, y0), (x1, y1) = points[hull[-2]], points[hull[-1]]
            if (y0 - y1) * (x - x1) > (y1 - y) * (x1 - x0):
                break
            hull.pop()
        hull.append(index)
    return hull


def _table(program: Program, path: _Path) -> tuple[_Floats, _Floats, _Floats]:
    """Returns the device bytes, host bytes and movable bytes after each number of steps of a path."""
    num_buffers = len(program.buffers)

    def vector(group: int, option: int) -> list[float]:
        chosen = program.blocks[group].options[option]
        buffered = chosen.buffered_nbytes or (0.0,) * num_buffers
        return [chosen.nbytes[_DEVICE], chosen.nbytes[_HOST], chosen.movable_nbytes, *buffered]

    start = np.array([program.nbytes[_DEVICE], program.nbytes[_HOST], *[0.0] * (1 + num_buffers)])
    for group, option in enumerate(path.first):
        start += program.blocks[group].count * np.array(vector(group, option))
    changes = [
        np.array(vector(step.group, step.after)) - np.array(vector(step.group, step.before)) for step in path.steps
    ]
    rows = np.cumsum([start, *np.repeat(changes, path.numbers, axis=0)], axis=0) if changes else start[None]
    tiers = [rows[:, 0], rows[:, 1]]
    for number, buffer in enumerate(program.buffers):
        tiers[buffer.tier] = tiers[buffer.tier] + np.minimum(rows[:, 3 + number], buffer.most_nbytes)
    return tiers[0], tiers[1], rows[:, 2]
