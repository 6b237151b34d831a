"""A planned job, simulated: what its steps take with queues and waits, of which the planner's sums know nothing."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from windlass.actors.context import JobContext, SsdFacts, make_context
from windlass.actors.job_spec import Hyperparameters, Initialization, JobSpec, Schedule
from windlass.actors.messages import Phase
from windlass.actors.scheduler import job_shape
from windlass.actors.simulation import Rates, Work, simulate
from windlass.actors.spans_file import StepSpans
from windlass.engine.layout import ModelLayout
from windlass.engine.partition import CHUNK_GRANULE
from windlass.planner.activation_ways import ways_of_layer
from windlass.planner.solver import Solution
from windlass.planner.speeds import Speeds
from windlass.storage.checksum import GRANULE_NBYTES
from windlass.storage.ids import Formats, JobId
from windlass.storage.transfers import DEFAULT_IO

# Steps that are simulated, and how many of the first are not steady yet.
_NUM_STEPS = 4
_NUM_FIRST_STEPS = 2
# What a message takes between two processes.
_MESSAGE_S = 0.0005
# More chunks, or more slots of activations, than that are simulated as fewer, larger ones.
_MAX_CHUNKS = 2000
_MAX_ACTIVATION_SLOTS = 4000
_MAX_PIECES = 8
# Of a layer and micro-batch: each has slots of its own.
_MOST_TENSORS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSteps:
    """What came out."""

    step_s: float  # in steady state
    steps: Sequence[StepSpans]


def simulate_planned(
    solution: Solution, layout: ModelLayout, formats: Formats, *, num_cores: int, limit_s: float = math.inf
) -> SimulatedSteps:
    """The steps of a planned job on its machine. `num_cores`: of one whose device is the CPU.

    Raises:
        Stuck: the job would not end.
        TooLong: the simulation has taken `limit_s`.
    """
    until_s = time.monotonic() + limit_s
    speeds = solution.costs.speeds
    spec, layout = _spec_of(solution, formats), _in_fewer_chunks(layout)
    if layout.chunk_numel != solution.costs.job.model.chunk_numel:
        cached_nbytes = solution.plan.num_cached_params * solution.plan.params.slot_nbytes
        slot_nbytes = layout.chunk_numel * solution.costs.job.param_itemsize
        placement = replace(solution.placement, num_cached_params=cached_nbytes // slot_nbytes)
        spec = replace(spec, placement=placement, host_memory_nbytes=None)
    # What is urgent goes first after each piece: so many of a chunk are enough.
    piece_nbytes = layout.chunk_numel * sum(formats.itemsizes.values()) // _MAX_PIECES
    piece_nbytes = max(DEFAULT_IO.piece_nbytes, piece_nbytes // GRANULE_NBYTES * GRANULE_NBYTES)
    ssd = SsdFacts(io=replace(DEFAULT_IO, piece_nbytes=piece_nbytes), weight=1)
    ssds = (ssd,) * speeds.num_ssds
    context = _with_fewer_slots(make_context(spec, layout, "", ssds))
    rates = rates_of(speeds, solution.costs.job.num_optimizers, num_cores=num_cores)
    shape, work = job_shape(context, lambda _: "{}"), work_of(solution)
    steps = simulate(context, shape, rates, work, is_late=lambda: time.monotonic() > until_s)[_NUM_FIRST_STEPS:]
    return SimulatedSteps(step_s=statistics.fmean(step.summary["period_s"] for step in steps), steps=steps)


def rates_of(speeds: Speeds, num_optimizers: int, *, num_cores: int) -> Rates:
    """Of a machine, for the simulator. Where the device is the CPU, rates are those of all its cores."""
    return Rates(
        h2d_bytes=speeds.h2d_bytes,
        d2h_bytes=speeds.d2h_bytes,
        ssd_read_bytes=(speeds.ssd_read_bytes,) * speeds.num_ssds,
        ssd_write_bytes=(speeds.ssd_write_bytes,) * speeds.num_ssds,
        optimizer_params=speeds.optimizer_params / (1 if speeds.shares_cores else num_optimizers),
        device_params=speeds.device_params,
        message_s=_MESSAGE_S,
        gives_ahead=not speeds.shares_cores,
        num_cores=num_cores if speeds.shares_cores else None,
    )


def work_of(solution: Solution) -> Work:
    """What operations take by the costs that the plan was made with, and what they swap."""
    costs, model = solution.costs, solution.costs.job.model
    group_size, head = costs.group_size, len(model.layers) + 1
    embedding_s = costs.compute_s(model.embedding)
    seconds = {
        (Phase.FORWARD, 0): group_size * embedding_s[0],
        (Phase.BACKWARD, 0): group_size * embedding_s[1],
        (Phase.HEAD, head): group_size * sum(costs.compute_s(model.head)),
    }
    swapped = {}
    ways = {layer: {way.choice: way for way in ways_of_layer(layer)} for layer in set(model.layers)}
    for block, (layer, choice) in enumerate(zip(model.layers, solution.placement.activations, strict=True), start=1):
        way = ways[layer][choice]
        seconds[(Phase.FORWARD, block)] = group_size * costs.compute_s(layer)[0]
        seconds[(Phase.BACKWARD, block)] = group_size * costs.backward_s(layer, way)
        if choice.swaps:
            swapped[block] = way.out_nbytes
    return Work(compute_s=seconds, swapped_nbytes=swapped)


def _in_fewer_chunks(layout: ModelLayout) -> ModelLayout:
    numel = sum(block.numel for block in layout.blocks)
    granules = -(-numel // (_MAX_CHUNKS * CHUNK_GRANULE))
    return replace(layout, chunk_numel=max(layout.chunk_numel, granules * CHUNK_GRANULE))


def _with_fewer_slots(context: JobContext) -> JobContext:
    """Room for activations in larger slots: each tensor takes at most one more of them. As many are staged."""
    plan, pool = context.plan, context.plan.activations
    factor = -(-pool.num_slots // _MAX_ACTIVATION_SLOTS)
    if factor <= 1:
        return context
    num_tensors = plan.group_size * sum(_MOST_TENSORS for choice in plan.layer_activations if choice.swaps)
    num_host = -(-plan.num_host_activations // factor) + num_tensors
    activations = replace(pool, slot_nbytes=pool.slot_nbytes * factor, num_slots=num_host + plan.num_staged_activations)
    num_ssd = -(-plan.num_ssd_activations // factor) if plan.num_ssd_activations else 0
    return replace(context, plan=replace(plan, activations=activations, num_ssd_activations=num_ssd))


def _spec_of(solution: Solution, formats: Formats) -> JobSpec:
    """A job that is like the planned one wherever the simulator looks; it has no files."""
    job = solution.costs.job
    return JobSpec(
        job=JobId("planned"),
        model_dir="",
        initialization=Initialization.RANDOM,
        layout_file="",
        dataset_dir="",
        job_dir="",
        output_dir="",
        ssd_dirs=tuple(map(str, range(solution.costs.speeds.num_ssds))),
        hyperparameters=Hyperparameters(
            epochs=1,
            batch_size=job.model.num_examples * job.num_microbatches,
            num_microbatches=job.num_microbatches,
            sequence_length=job.model.num_tokens,
            learning_rate=1e-4,
            warmup_steps=0,
            schedule=Schedule.CONSTANT,
            weight_decay=0.0,
            beta1=0.9,
            beta2=0.999,
            epsilon=1e-8,
            clip_norm=1.0 if job.keeps_grads else None,
            precision=formats.precision,
            seed=0,
            state_precision=formats.states,
        ),
        total_steps=_NUM_STEPS,
        num_cpu_optimizers=job.num_optimizers,
        host_memory_nbytes=solution.plan.arena_nbytes,
        deadline_s=1.0,
        placement=solution.placement,
    )
