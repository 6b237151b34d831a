"""Corrects the rates and times of a machine and model by a job's first steps, to make its plan again.

A rate is the work of a resource divided by the time in which it was busy. So waiting does not lower its rate.
A resource that was hardly busy keeps the rate of the machine's profile. `_MAX_FACTOR` limits how far a measurement can
mislead a plan.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, median

from windlass.engine.memory_plan import Placement
from windlass.planner.cost import BlockProfile, LayerProfile, ModelProfile, Speeds, ways_of_layer
from windlass.planner.solver import StepCosts

# Minimum work for a rate to count: a share of the step, and bytes or params. Below it, fixed costs at the start of the
# work could dominate.
_LEAST_SHARE = 0.05
_LEAST_NBYTES = 4 << 20
_LEAST_PARAMS = 1_000_000
# Maximum factor by which a corrected rate may differ from the assumed one, up or down.
_MAX_FACTOR = 30.0
# Relative change from which a correction is reported to the user.
_MIN_REPORTED_CHANGE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDone:
    """Work that a resource did in a step, and its busy time. For parallel resources both are means."""

    amount: float = 0.0  # bytes, or parameters
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step in steady state. Resources have the names of the rates in `Speeds`."""

    period_s: float
    done: Mapping[str, WorkDone]
    forward_s: Mapping[int, float]  # by block, all micro-batches; the head's includes its backward pass
    backward_s: Mapping[int, float]  # by block, with recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Corrected rates and times.

    `factors` maps names of rates in `Speeds` to factors. `block_s` maps each measured block to the seconds of one
    micro-batch: forward, and backward without recomputation.
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    block_s: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    in_words: tuple[str, ...] = ()  # differences from the assumed rates, for the user

    def of_speeds(self, speeds: Speeds) -> Speeds:
        """Returns a machine's corrected rates."""
        return replace(speeds, **{name: getattr(speeds, name) * factor for name, factor in self.factors.items()})

    def of_model(self, model: ModelProfile) -> ModelProfile:
        """Returns a profile with the measured times. Its micro-batches must have the measured shape."""

        def timed(block: int, profile: BlockProfile) -> BlockProfile:
            if block not in self.block_s:
                return profile
            forward_s, backward_s = self.block_s[block]
            if isinstance(profile, LayerProfile) and profile.again is not None and profile.forward_s and forward_s:
                profile = replace(profile, again=profile.again.sped_up(profile.forward_s / forward_s))
            return replace(profile, forward_s=forward_s, backward_s=backward_s)

        layers: list[LayerProfile] = []
        for block, layer in enumerate(model.layers, start=1):
            timed_layer = timed(block, layer)
            assert isinstance(timed_layer, LayerProfile)
            layers.append(timed_layer)
        head = len(layers) + 1
        return replace(model, embedding=timed(0, model.embedding), layers=tuple(layers), head=timed(head, model.head))


def correction_of(
    steps: Sequence[MeasuredStep], costs: StepCosts, placement: Placement, *, planned_compute_s: float
) -> Correction:
    """Derives the correction from steps of a job that ran with this placement.

    `costs` holds the rates that the job was planned with. `planned_compute_s`: planned compute time of a step.

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("no steps were measured: nothing can be said of the machine")
    factors, words = {}, []
    for name, kind in _RATES.items():
        planned = getattr(costs.speeds, name)
        if (measured := _rate(steps, name, kind.least)) is None:
            continue
        factors[name] = factor = _clamped(measured / planned)
        if abs(factor - 1) >= _MIN_REPORTED_CHANGE:
            words.append(kind.words.format(kind.format_rate(factor * planned), kind.format_rate(planned)))
    steps = [_without_ssds(step, costs.speeds) for step in steps]
    block_s = _block_s([_without_lanes(step, costs) for step in steps], costs, placement)
    compute_s = median(sum(step.forward_s.values()) + sum(step.backward_s.values()) for step in steps)
    compute_s += median(step.done.get("device_params", WorkDone()).busy_s for step in steps)
    factor = compute_s / planned_compute_s
    if (kept := _clamped(factor)) != factor:
        block_s = {block: (a * kept / factor, b * kept / factor) for block, (a, b) in block_s.items()}
    if abs(kept - 1) >= _MIN_REPORTED_CHANGE:
        words.append(f"a step computes for {kept * planned_compute_s:.3g} s, the plan said {planned_compute_s:.3g} s")
    return Correction(factors=factors, block_s=block_s, in_words=tuple(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The check and the report of one rate."""

    least: float  # minimum work in a step, in bytes or parameters
    words: str  # message with the measured rate and that of the profile
    is_bytes: bool = True

    def format_rate(self, rate: float) -> str:
        return f"{rate / 1e9:.3g} GB/s" if self.is_bytes else f"{rate:.3g}"


_RATES = {
    "h2d_bytes": _Kind(least=_LEAST_NBYTES, words="copies to the device move {}, the profile said {}"),
    "d2h_bytes": _Kind(least=_LEAST_NBYTES, words="copies from the device move {}, the profile said {}"),
    "ssd_read_bytes": _Kind(least=_LEAST_NBYTES, words="each SSD reads {}, the profile said {}"),
    "ssd_write_bytes": _Kind(least=_LEAST_NBYTES, words="each SSD writes {}, the profile said {}"),
    "optimizer_params": _Kind(
        least=_LEAST_PARAMS,
        words="the CPU updates {} parameters a second, the profile said {}",
        is_bytes=False,
    ),
    "device_params": _Kind(
        least=_LEAST_PARAMS,
        words="the device updates {} parameters a second, the profile said {}",
        is_bytes=False,
    ),
}


def _rate(steps: Sequence[MeasuredStep], name: str, least: float) -> float | None:
    """Returns the median over the steps with enough work, or None if no step has enough."""
    rates = []
    for step in steps:
        done = step.done.get(name, WorkDone())
        if done.amount >= least and done.busy_s >= _LEAST_SHARE * step.period_s:
            rates.append(done.amount / done.busy_s)
    return median(rates) if rates else None


def _without_ssds(step: MeasuredStep, speeds: Speeds) -> MeasuredStep:
    """Subtracts from a step's operations the time that the cores spent on the SSDs.

    This applies only if the device is the CPU. Every plan adds that time itself. At most half of an operation is
    subtracted, because SSD work slows nothing down while nothing is computed.
    """
    computed_s = sum(step.forward_s.values()) + sum(step.backward_s.values())
    if not speeds.shares_cores or not computed_s:
        return step
    moved = sum(step.done[name].amount for name in ("ssd_read_bytes", "ssd_write_bytes") if name in step.done)
    ssds_s = min(moved * speeds.num_ssds * speeds.ssd_cpu_s_per_byte, computed_s / 2)
    share = 1 - ssds_s / computed_s
    return replace(
        step,
        forward_s={block: share * seconds for block, seconds in step.forward_s.items()},
        backward_s={block: share * seconds for block, seconds in step.backward_s.items()},
    )


def _without_lanes(step: MeasuredStep, costs: StepCosts) -> MeasuredStep:
    """Subtracts from a step's operations the planned time of adding lanes and of their norms.

    Spans do not separate it, and every plan adds it itself. At most half of an operation is subtracted.
    """
    if costs.job.lanes.num_lanes == 1:
        return step
    shared, head = costs.job.model.shared, len(costs.job.model.layers) + 1

    def left_s(block: int, seconds: float) -> float:
        lanes_s = sum(map(costs.adding_lanes_s, shared[block])) + costs.norms_s(block)
        return max(seconds - lanes_s, seconds / 2)

    return replace(
        step,
        forward_s={
            block: left_s(block, seconds) if block == head else seconds for block, seconds in step.forward_s.items()
        },
        backward_s={block: left_s(block, seconds) for block, seconds in step.backward_s.items()},
    )


def _clamped(factor: float) -> float:
    return min(max(factor, 1 / _MAX_FACTOR), _MAX_FACTOR)


def _block_s(steps: Sequence[MeasuredStep], costs: StepCosts, placement: Placement) -> dict[int, tuple[float, float]]:
    """Returns the times of each measured block. Blocks of equal shape get their mean, so that they stay equal."""
    model, num = costs.job.model, costs.num_successive
    forward_s, backward_s = (
        {block: median(times[block] for times in taken) / num for block in _in_all(taken)}
        for taken in ([step.forward_s for step in steps], [step.backward_s for step in steps])
    )
    head, block_times = len(model.layers) + 1, {}
    if head in forward_s:
        block_times[head] = (forward_s[head], 0.0)
    if 0 in forward_s and 0 in backward_s:
        block_times[0] = (forward_s[0], backward_s[0])
    # Skip streamed layers, because they wait for their params while they compute.
    measured = (forward_s.keys() & backward_s.keys()) - {0, head, *placement.streamed_blocks}
    for layer, blocks in _equal_layers(model, measured):
        ways = {way.choice: way for way in ways_of_layer(layer)}
        mean_s = fmean(forward_s[block] for block in blocks)
        # Use the planned time of recomputation, because spans do not separate it from the rest of a backward pass.
        again_s = fmean(costs.again_s(layer, ways[placement.activations[block - 1]]) for block in blocks)
        left_s = fmean(backward_s[block] for block in blocks) - again_s * mean_s / costs.compute_s(layer)[0]
        # Backward computes at least as much as forward, whatever was measured.
        block_times |= dict.fromkeys(blocks, (mean_s, max(left_s, mean_s)))
    return block_times


def _in_all(taken: Sequence[Mapping[int, float]]) -> Iterator[int]:
    return (block for block in set(chain.from_iterable(taken)) if all(block in times for times in taken))


def _equal_layers(model: ModelProfile, measured: set[int]) -> Iterator[tuple[LayerProfile, list[int]]]:
    """Groups equal layers. A group is included only if all of its layers were measured."""
    kinds: dict[LayerProfile, list[int]] = {}
    for block, layer in enumerate(model.layers, start=1):
        kinds.setdefault(layer, []).append(block)
    return ((layer, blocks) for layer, blocks in kinds.items() if measured.issuperset(blocks))
