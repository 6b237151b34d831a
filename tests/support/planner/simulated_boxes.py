"""Simulated jobs over several boxes for tests, as fast as possible except where a test makes something slow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.support.actors.specs import make_layout, make_spec
from tests.support.planner.simulated import CHUNK, rates, simple_work
from windlass.actors.job.context import JobContext, make_context
from windlass.actors.messages import WorkSpan
from windlass.actors.policy.config import SchedulerConfig
from windlass.actors.scheduler.scheduler import job_shape
from windlass.actors.worker_policy.stages import Stage
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import ACTIVATION_SLOT_NBYTES, Placement
from windlass.engine.model.layout import ModelLayout
from windlass.planner.simulation.job import SimulatedBox, SimulatedJob
from windlass.planner.simulation.network import NetworkRates
from windlass.planner.simulation.simulate import Rates, steady_step_s
from windlass.storage.ids import BlockIndex

HIDDEN_NBYTES = 1000  # of a micro-batch


def tied(layout: ModelLayout) -> ModelLayout:
    """The layout with a head that shares the embedding's params."""
    head = BlockIndex(len(layout.blocks) - 1)
    return replace(layout, shared=(*layout.shared[:-1], (head, BlockIndex(0))))


@dataclass(frozen=True, kw_only=True)
class SimulatedBoxes:
    """A job over several boxes, whose operations all take equally long."""

    contexts: tuple[JobContext, ...]
    machines: tuple[Rates, ...]
    compute_s: tuple[float, ...]
    network: NetworkRates
    first_layer_swaps: int = 0  # bytes of a micro-batch

    def steady_step_s(self) -> float:
        first, *others = self.boxes
        return steady_step_s(first.context, self.shape, first.rates, first.work, others=others, network=self.network)

    def spans(self) -> list[WorkSpan]:
        """The spans of all boxes."""
        return self.started().run()

    def started(self, *, keeps_spans: bool = True) -> SimulatedJob:
        first, *others = self.boxes
        return SimulatedJob(
            first.context,
            self.shape,
            first.rates,
            first.work,
            keeps_spans=keeps_spans,
            others=others,
            network=self.network,
        )

    @property
    def boxes(self) -> list[SimulatedBox]:
        return [
            SimulatedBox(
                context=context,
                rates=machine,
                work=replace(
                    simple_work(len(context.layout.blocks), seconds),
                    crossing_nbytes=HIDDEN_NBYTES,
                    swapped_nbytes={1: [self.first_layer_swaps]} if _swaps(context) else {},
                ),
            )
            for context, machine, seconds in zip(self.contexts, self.machines, self.compute_s, strict=True)
        ]

    @property
    def shape(self) -> SchedulerConfig:
        first, *others = self.contexts
        return job_shape(first, first.spec.output_dir, others)


def _swaps(context: JobContext) -> bool:
    return any(choice.swaps for choice in context.plan.layer_activations)


def job_over(
    *stops: int,
    num_groups: int = 2,
    group_size: int = 1,
    num_steps: int = 4,
    compute_s: float | Sequence[float] = 1.0,
    machine: Rates | None = None,
    card_bytes: float = 1e15,
    round_trip_s: float = 0.0,
    is_tied: bool = False,
    first_layer_swaps: int = 0,
    training: dict[str, Any] | None = None,
    **changes: Any,
) -> SimulatedBoxes:
    """A job whose boxes have the blocks up to each of `stops`. `compute_s`: of an operation, on all boxes or each."""
    layout = replace(make_layout(*[2 * CHUNK] * stops[-1], chunk_numel=CHUNK), hidden_size=16)
    layout = tied(layout) if is_tied else layout
    starts = (0, *stops[:-1])
    stages = tuple(Stage(first, stop) for first, stop in zip(starts, stops, strict=True))
    options = {
        "total_steps": num_steps,
        "num_cpu_optimizers": 1,
        "batch_size": num_groups * group_size,
        "num_microbatches": num_groups * group_size,
        "placement": Placement(group_size=group_size),
        **changes,
    }
    spec = make_spec(training=training, **options)
    if len(stages) > 1:
        spec = replace(spec, stages=stages)
    specs = [replace(spec, box=box) for box in range(len(stages))]
    if first_layer_swaps:
        # A slot for each group in flight: one for each box.
        swap, *others = ActivationChoice.SWAP.of_layers(1) + ActivationChoice.RECOMPUTE.of_layers(stops[-1] - 3)
        room_nbytes = len(stages) * group_size * ACTIVATION_SLOT_NBYTES
        placement = replace(spec.placement, activations=(swap, *others), host_activation_nbytes=room_nbytes)
        specs[0] = replace(specs[0], placement=placement)
    seconds = (compute_s,) * len(stages) if isinstance(compute_s, int | float) else tuple(compute_s)
    return SimulatedBoxes(
        contexts=tuple(make_context(each, layout, "") for each in specs),
        first_layer_swaps=first_layer_swaps,
        machines=(machine or rates(),) * len(stages),
        compute_s=seconds,
        network=NetworkRates(card_bytes=(card_bytes,) * len(stages), round_trip_s=round_trip_s),
    )
