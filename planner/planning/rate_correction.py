"""What a job's first steps say of its machine and model: rates and times with which its plan is made again.

Each rate is what a resource did over the time in which it worked, so that one which waits is not a slow one; and what
hardly worked keeps the rate that the machine's profile gives it. A plan may only be misled so far: see `_SANE`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, median

from windlass.engine.memory_plan import Placement
from windlass.planner.cost import BlockProfile, LayerProfile, ModelProfile, Speeds, ways_of_layer
from windlass.planner.solver import StepCosts

# A resource that worked less than this share of a step, or did less than so much of its work, says nothing of its rate:
# what it did may have been but the begin of it.
_LEAST_SHARE = 0.05
_LEAST_NBYTES = 4 << 20
_LEAST_PARAMS = 1_000_000
# A rate is at most so many times as large, or as small, as it was taken to be.
_SANE = 30.0
# Less is not worth a word.
_WORTH_TELLING = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a resource did in a step, and how long it worked at it; of several that work at once, the mean."""

    amount: float = 0.0  # bytes, or parameters
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step in steady state. The resources are named as the rates of `Speeds`."""

    period_s: float
    done: Mapping[str, Done]
    forward_s: Mapping[int, float]  # of each block, all micro-batches; the head's has both its passes
    backward_s: Mapping[int, float]  # with what is computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """`factors`: of rates of `Speeds`, by their names. `block_s`: of one micro-batch of each block that was measured,
    forward, and backward without computing anything again.
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    block_s: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    in_words: tuple[str, ...] = ()  # what is otherwise than it was taken to be

    def of_speeds(self, speeds: Speeds) -> Speeds:
        """A machine's, corrected."""
        return replace(speeds, **{name: getattr(speeds, name) * factor for name, factor in self.factors.items()})

    def of_model(self, model: ModelProfile) -> ModelProfile:
        """A profile for micro-batches of the shape that was measured, with the times that were."""

        def timed(block: int, profile: BlockProfile) -> BlockProfile:
            if block not in self.block_s:
                return profile
            forward_s, backward_s = self.block_s[block]
            if isinstance(profile, LayerProfile) and profile.again is not None and profile.forward_s and forward_s:
                profile = replace(profile, again=profile.again.sped_up(profile.forward_s / forward_s))
            return replace(profile, forward_s=forward_s, backward_s=backward_s)

        layers: list[LayerProfile] = []
        for block, layer in enumerate(model.layers, start=1):
            found = timed(block, layer)
            assert isinstance(found, LayerProfile)
            layers.append(found)
        head = len(layers) + 1
        return replace(model, embedding=timed(0, model.embedding), layers=tuple(layers), head=timed(head, model.head))


def correction_of(
    steps: Sequence[MeasuredStep], costs: StepCosts, placement: Placement, *, planned_compute_s: float
) -> Correction:
    """What the steps of a job say that ran by this placement. `costs`: with the rates that it was planned with.

    `planned_compute_s`: what a step was to compute.

    Raises:
        ValueError: no steps.
    """
    if not steps:
        raise ValueError("no steps were measured: nothing can be said of the machine")
    factors, words = {}, []
    for name, kind in _RATES.items():
        planned = getattr(costs.speeds, name)
        if (measured := _rate(steps, name, kind.least)) is None:
            continue
        factors[name] = factor = _sane(measured / planned)
        if abs(factor - 1) >= _WORTH_TELLING:
            words.append(kind.words.format(kind.tell(factor * planned), kind.tell(planned)))
    steps = [_without_ssds(step, costs.speeds) for step in steps]
    block_s = _block_s(steps, costs, placement)
    compute_s = median(sum(step.forward_s.values()) + sum(step.backward_s.values()) for step in steps)
    compute_s += median(step.done.get("device_params", Done()).busy_s for step in steps)
    factor = compute_s / planned_compute_s
    if (kept := _sane(factor)) != factor:
        block_s = {block: (a * kept / factor, b * kept / factor) for block, (a, b) in block_s.items()}
    if abs(kept - 1) >= _WORTH_TELLING:
        words.append(f"a step computes for {kept * planned_compute_s:.3g} s, the plan said {planned_compute_s:.3g} s")
    return Correction(factors=factors, block_s=block_s, in_words=tuple(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Of a rate: the least that must have been done, and how it is told."""

    least: float
    words: str  # what was measured, and what the profile says
    is_bytes: bool = True

    def tell(self, rate: float) -> str:
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
    """The median of the steps in which there was enough of it; None if there was in none."""
    rates = []
    for step in steps:
        done = step.done.get(name, Done())
        if done.amount >= least and done.busy_s >= _LEAST_SHARE * step.period_s:
            rates.append(done.amount / done.busy_s)
    return median(rates) if rates else None


def _without_ssds(step: MeasuredStep, speeds: Speeds) -> MeasuredStep:
    """Where cores are shared, operations took longer by what these did for the SSDs, with which every plan counts
    anyway. It is no more than half of it: what was done while nothing was computed slowed nothing down.
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


def _sane(factor: float) -> float:
    return min(max(factor, 1 / _SANE), _SANE)


def _block_s(steps: Sequence[MeasuredStep], costs: StepCosts, placement: Placement) -> dict[int, tuple[float, float]]:
    """Blocks that are alike take the same, so that they stay alike: the mean of theirs."""
    model, num = costs.job.model, costs.job.num_microbatches
    forward_s, backward_s = (
        {block: median(times[block] for times in taken) / num for block in _in_all(taken)}
        for taken in ([step.forward_s for step in steps], [step.backward_s for step in steps])
    )
    head, found = len(model.layers) + 1, {}
    if head in forward_s:
        found[head] = (forward_s[head], 0.0)
    if 0 in forward_s and 0 in backward_s:
        found[0] = (forward_s[0], backward_s[0])
    # Layers in pieces wait for these while they compute.
    measured = (forward_s.keys() & backward_s.keys()) - {0, head, *placement.streamed_blocks}
    for layer, blocks in _alike(model, measured):
        ways = {way.choice: way for way in ways_of_layer(layer)}
        mean_s = fmean(forward_s[block] for block in blocks)
        # By what was planned for it: nothing tells it from the rest of a backward pass.
        again_s = fmean(costs.again_s(layer, ways[placement.activations[block - 1]]) for block in blocks)
        left_s = fmean(backward_s[block] for block in blocks) - again_s * mean_s / costs.compute_s(layer)[0]
        # Backward computes at least what forward does, whatever the two were measured to be.
        found |= dict.fromkeys(blocks, (mean_s, max(left_s, mean_s)))
    return found


def _in_all(taken: Sequence[Mapping[int, float]]) -> Iterator[int]:
    return (block for block in set(chain.from_iterable(taken)) if all(block in times for times in taken))


def _alike(model: ModelProfile, measured: set[int]) -> Iterator[tuple[LayerProfile, list[int]]]:
    """Layers of which all that are alike were measured."""
    kinds: dict[LayerProfile, list[int]] = {}
    for block, layer in enumerate(model.layers, start=1):
        kinds.setdefault(layer, []).append(block)
    return ((layer, blocks) for layer, blocks in kinds.items() if measured.issuperset(blocks))
