"""Simulated jobs for tests, on a machine that is nearly infinitely fast except where a test makes it slow."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.job.context import JobContext, make_context
from windlass.actors.messages import Phase, SpanKind, WorkSpan
from windlass.actors.policy.config import SchedulerConfig
from windlass.actors.scheduler.scheduler import job_shape
from windlass.actors.timeline.span_files import StepSpans
from windlass.engine.model.layout import BlockLayout, ModelLayout, ParamSlice
from windlass.planner.simulation.job import SimulatedJob
from windlass.planner.simulation.simulate import Rates, Work, simulate, steady_step_s
from windlass.storage.ids import BlockIndex

CHUNK = 4096
FAST = 1e12


def rates(**changes: Any) -> Rates:
    given_rates: dict[str, Any] = {
        "h2d_bytes": FAST,
        "d2h_bytes": FAST,
        "ssd_read_bytes": (FAST, FAST),
        "ssd_write_bytes": (FAST, FAST),
        "optimizer_params": FAST,
        "device_params": FAST,
    }
    return Rates(**{**given_rates, **changes})


def simple_work(num_blocks: int, compute_s: float, swapped_nbytes: dict[int, Sequence[int]] | None = None) -> Work:
    """Work in which all operations take `compute_s`."""
    phases = (Phase.FORWARD, Phase.HEAD, Phase.BACKWARD)
    seconds = {(phase, block): compute_s for phase in phases for block in range(num_blocks)}
    return Work(compute_s=seconds, swapped_nbytes=swapped_nbytes or {})


def layers_of(*modules: Sequence[int], num_norms: int, num_blocks: int, head_numel: int = CHUNK) -> ModelLayout:
    """Layers with matrices of the given numbers of elements in each module, and norms.

    The embedding has one chunk, and the head `head_numel` elements.
    """
    params: list[ParamSlice] = []
    numels = [(f"{m}.{i}", numel, True) for m, module in enumerate(modules) for i, numel in enumerate(module)]
    for name, numel, decay in (*numels, ("norm.weight", num_norms, False)):
        offset = sum(param.numel for param in params)
        params.append(ParamSlice(name=name, shape=(numel,), offset=offset, numel=numel, decay=decay))
    plain = make_layout(*[CHUNK] * (num_blocks - 1), head_numel, chunk_numel=CHUNK)
    layers = [BlockLayout(BlockIndex(b), f"layers.{b}", tuple(params)) for b in range(1, num_blocks - 1)]
    return ModelLayout((plain.blocks[0], *layers, plain.blocks[-1]), {}, CHUNK, plain.shared)


def context_of(
    layout: ModelLayout, *, num_steps: int, training: dict[str, Any] | None = None, **changes: Any
) -> JobContext:
    """The context of a job with one optimizer, unless `changes` to its spec say otherwise."""
    options = {"total_steps": num_steps, "num_cpu_optimizers": 1, **changes}
    return make_context(make_spec(training=training, **options), layout, "")


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A job whose operations all take equally long."""

    context: JobContext
    machine: Rates
    work: Work

    def steps(self) -> list[StepSpans]:
        return simulate(self.context, self.shape, self.machine, self.work)

    def steady_step_s(self) -> float:
        return steady_step_s(self.context, self.shape, self.machine, self.work)

    def spans(self) -> list[WorkSpan]:
        """The spans of all steps."""
        return SimulatedJob(self.context, self.shape, self.machine, self.work).run()

    @property
    def shape(self) -> SchedulerConfig:
        """The scheduler's config, made as the scheduler makes it."""
        return job_shape(self.context, self.context.spec.output_dir)


def job(
    *,
    num_blocks: int = 6,
    num_chunks: int = 2,
    num_steps: int = 4,
    compute_s: float = 1.0,
    machine: Rates | None = None,
    layout: ModelLayout | None = None,
    swapped_nbytes: dict[int, Sequence[int]] | None = None,
    training: dict[str, Any] | None = None,
    **changes: Any,
) -> Simulated:
    """A simulated job. `changes`: fields of its spec."""
    layout = layout or make_layout(*[CHUNK * num_chunks] * num_blocks, chunk_numel=CHUNK)
    context = context_of(layout, num_steps=num_steps, training=training, **changes)
    work = simple_work(len(layout.blocks), compute_s, swapped_nbytes)
    return Simulated(context=context, machine=machine or rates(), work=work)


def run(**options: Any) -> list[StepSpans]:
    """The steps of a `job`."""
    return job(**options).steps()


def moved(spans: Iterable[WorkSpan], kind: SpanKind, step: int | None = None) -> int:
    """Bytes moved by spans of one kind, in one step or in all."""
    return sum(span.nbytes for span in spans if span.kind is kind and step in (None, span.step))
