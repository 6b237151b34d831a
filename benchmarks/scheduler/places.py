"""Measures where states in host memory should be: those of the first blocks, or of blocks among the others.

Half of the layers have their states in host memory, the others on the SSD. Updates, the SSD and compute take about the
same time. So it matters whether CPU and SSD work at the same time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.reporting.report import Report, spread
from benchmarks.scheduler.cases import Bench, Reference, Result, result_of
from benchmarks.scheduler.throttle import Throttle
from windlass.engine.memory_plan import Placement

# Steps between two commits of states in memory: more than a job of the benchmark has.
_COMMIT_EVERY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The layers with states in host memory, and whether gradients are clipped."""

    is_spread: bool  # every second layer; else the first half of all
    clips: bool

    def host_blocks(self, num_layers: int) -> tuple[int, ...]:
        """Returns the blocks with states in host memory."""
        return tuple(range(1, num_layers + 1, 2)) if self.is_spread else tuple(range(1, -(-num_layers // 2) + 1))


def throttle_of(reference: Reference) -> Throttle:
    """Returns rates with which updates take as long as compute, and half of the SSD's bytes nearly as long."""
    return Throttle(
        compute_flop_per_s=sum(reference.flop) / reference.compute_s,
        optimizer_params_per_s=reference.layout.numel / reference.compute_s,
        ssd_bytes_per_s=reference.ssd_nbytes / 2 / (0.9 * reference.compute_s),
    )


def measure_places(
    bench: Bench, reference: Reference, num_layers: int
) -> tuple[dict[Place, Result], dict[Place, float]]:
    """Trains with each place, and returns the measured results and the simulated step times."""
    throttle, measured, simulated = throttle_of(reference), {}, {}
    for clips, is_spread in product((True, False), (False, True)):
        place = Place(is_spread=is_spread, clips=clips)
        placement = Placement(host_blocks=place.host_blocks(num_layers), commit_every=_COMMIT_EVERY)
        spec = replace(bench.spec().with_training(clip_norm=1.0 if clips else None), placement=placement)
        measured[place] = result_of(bench.train(spec, throttle), throttle)
        simulated[place] = bench.predict(spec, reference, throttle)
    return measured, simulated


def first_over_spread(measured: Mapping[Place, Result], *, clips: bool) -> float:
    """Returns the speed-up of states among the others over states of the first blocks."""
    first, among = (measured[Place(is_spread=is_spread, clips=clips)] for is_spread in (False, True))
    return first.mean_step_s / among.mean_step_s


def add_places(report: Report, measured: Mapping[Place, Result], simulated: Mapping[Place, float]) -> None:
    """Adds a table with the step time of each place."""
    rows = [
        (
            "every second layer" if place.is_spread else "the first half",
            "on" if place.clips else "off",
            spread(result.step_s),
            f"{result.mean_step_s:.2f}",
            f"{simulated[place]:.2f}",
        )
        for place, result in measured.items()
    ]
    report.add_table(("states in host memory", "clipping", "step, s", "mean", "simulated, s"), rows)
