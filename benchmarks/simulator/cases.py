"""Runs one job of `benchmarks.simulator` on a machine with declared rates, and simulates it with the same rates.

The model is small and the rates are low, so the machine's own time hardly matters. Nothing is fitted.
"""

import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

from benchmarks.peers.windlass_runner import job_spec
from benchmarks.peers.workload import MODEL_DIR, ModelShape, Workload
from benchmarks.simulator.slow_machine import SlowMachine
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.job import JOURNAL_FILE, JobContext, JobSpec, SsdFacts, make_context, read_journal
from windlass.actors.job.journal import METRICS
from windlass.actors.messages import Message, Phase, SpanKind, SpansReported, WorkSpan
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.scheduler import job_shape
from windlass.engine.memory_plan import ActivationChoice, Placement, QueueDepths
from windlass.engine.memory_plan.arena import layout as arena_layout
from windlass.engine.model import Partition, build_meta_model, load_config
from windlass.engine.slices import num_slice_tokens
from windlass.planner.simulation.simulate import Rates, Work, simulate
from windlass.storage.ids import ActorName, Kernel, Precision
from windlass.storage.io import DEFAULT_IO

NUM_LAYERS, NUM_STEPS, BATCH_SIZE, LENGTH = 3, 4, 4, 48
# Elements: makes five chunks a layer, the last one shorter.
_CHUNK_NUMEL = 8192
_SSDS = (SsdFacts(io=DEFAULT_IO, weight=1),) * 2
# Bytes: as large as a tensor. With smaller slots, messages about parts of a page would matter.
_ACTIVATION_SLOT_NBYTES = 1 << 15
# Bytes: less than the swapped activations of a layer and micro-batch.
_LEAVING_NBYTES = 1 << 18
# The first step does not know the order of pieces yet, and the last step has no next one.
_INNER = slice(1, NUM_STEPS - 1)
# Kinds whose bytes depend on the plan and the choices alone, not on timing. For reads of activations this holds only
# with slow SSDs.
_DECIDED = frozenset(
    (
        SpanKind.COPY_PARAMS_IN,
        SpanKind.COPY_GRAD_OUT,
        SpanKind.COPY_PARTIAL_OUT,
        SpanKind.COPY_PARTIAL_IN,
        SpanKind.COPY_ACTIVATIONS_OUT,
        SpanKind.COPY_ACTIVATIONS_IN,
        SpanKind.WRITE_ACTIVATIONS,
        SpanKind.READ_ACTIVATIONS,
    )
)
_SWAP = ActivationChoice.SWAP.of_layers(NUM_LAYERS)
_INPUTS = ActivationChoice.RECOMPUTE_SWAP_INPUT.of_layers(NUM_LAYERS)
_KEEP = ActivationChoice.KEEP.of_layers(NUM_LAYERS)
_ROOM = 8 << 20  # bytes for swapped activations: more than a job needs
_FAST = 1e9  # bytes per second: does not slow down the link

# Bytes by kind, block and step.
DecidedNbytes = Mapping[tuple[SpanKind, int, int], int]


class CaseFailedError(Exception):
    """Raised if a job does not end with a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job, and the rates of its slow machine."""

    placement: Placement
    layer_s: float  # forward time of a micro-batch
    h2d_bytes: float = _FAST  # per second
    d2h_bytes: float = _FAST
    ssd_bytes: float | None = None  # of each SSD; None: not slowed down
    optimizer_params: float | None = None  # updated per second; None: not slowed down
    num_slots: int | None = None  # chunks of states at the optimizer; None: as many as by default
    num_microbatches: int = 2
    lanes: int = 1
    num_ranks: int = 1  # with more, only bytes can be compared: the slow machine has one link and one GPU
    is_tied: bool = False
    clip_norm: float | None = None
    precision: Precision = Precision.FP32

    def hurried(self) -> "Case":
        """Returns the same job on a machine that is not slowed down."""
        return replace(self, layer_s=0.001, h2d_bytes=_FAST, d2h_bytes=_FAST, ssd_bytes=None, optimizer_params=None)


def _updates(num_slots: int) -> Case:
    """Returns a job with states on SSDs and in memory, whose updates take longer than its passes."""
    return Case(
        placement=Placement(host_blocks=(0, 1, 4)),
        layer_s=0.02,
        ssd_bytes=8e5,
        optimizer_params=1.5e5,
        num_slots=num_slots,
    )


CASES = {
    "swapped, the way out": Case(
        placement=Placement(activations=_SWAP, host_activation_nbytes=_ROOM),
        layer_s=0.05,
        d2h_bytes=3e6,
    ),
    "swapped, the way back": Case(
        placement=Placement(activations=_SWAP, host_activation_nbytes=_ROOM),
        layer_s=0.05,
        h2d_bytes=3e6,
    ),
    "inputs swapped, both": Case(
        placement=Placement(activations=_INPUTS, host_activation_nbytes=_ROOM),
        layer_s=0.06,
        h2d_bytes=6e5,
        d2h_bytes=6e5,
    ),
    "swapped, the SSDs": Case(
        placement=Placement(activations=_SWAP, host_activation_nbytes=1 << 20, ssd_activation_nbytes=_ROOM),
        layer_s=0.05,
        ssd_bytes=1.5e6,
    ),
    "in pieces": Case(placement=Placement(streamed_blocks=(1, 2, 3)), layer_s=0.1, h2d_bytes=1.2e6),
    "in pieces, graphs kept": Case(
        placement=Placement(streamed_blocks=(1, 2, 3), activations=_KEEP),
        layer_s=0.1,
        h2d_bytes=1.2e6,
    ),
    "groups, the way in": Case(
        placement=Placement(group_size=2),
        num_microbatches=4,
        layer_s=0.05,
        h2d_bytes=7e5,
        d2h_bytes=2e6,
    ),
    "groups, the way out": Case(
        placement=Placement(group_size=1),
        num_microbatches=4,
        is_tied=True,
        clip_norm=1.0,
        layer_s=0.05,
        d2h_bytes=5e5,
    ),
    "updates, few slots": _updates(num_slots=3),
    "updates, more slots": _updates(num_slots=5),
    "all of it": Case(
        placement=Placement(
            group_size=2,
            streamed_blocks=(2, 3),
            activations=_SWAP,
            host_activation_nbytes=1 << 20,
            ssd_activation_nbytes=_ROOM,
        ),
        num_microbatches=4,
        layer_s=0.1,
        h2d_bytes=3e6,
        d2h_bytes=3e6,
        ssd_bytes=4e6,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The steps of a job, without the first and the last."""

    step_s: float  # the mean
    nbytes: DecidedNbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The real and the simulated run of a job."""

    real: Run
    simulated: Run

    @property
    def simulated_over_real(self) -> float:
        """The ratio of the step times."""
        return self.simulated.step_s / self.real.step_s


def compare(case: Case, folder: Path, *, direct: bool = True) -> Comparison:
    """Runs and simulates a job with files below `folder`. Many cases can share the folder.

    `direct`: whether its file system supports O_DIRECT.

    Raises:
        CaseFailedError: the job did not end with a model.
    """
    with patch.object(arena_layout, "ACTIVATION_SLOT_NBYTES", _ACTIVATION_SLOT_NBYTES):
        spec = _spec(case, folder)
        partition = Partition(build_meta_model(load_config(spec.model_dir), case.precision), _CHUNK_NUMEL)
        num_tokens = BATCH_SIZE * LENGTH // case.num_microbatches
        # Seconds to multiply one param with all tokens of a micro-batch.
        product_s = case.layer_s / partition.layout.blocks[1].decay_numel
        machine = SlowMachine(
            products_per_s=num_tokens / product_s,
            h2d_bytes=case.h2d_bytes,
            d2h_bytes=case.d2h_bytes,
            ssd_bytes=case.ssd_bytes,
            optimizer_params=case.optimizer_params,
        )
        real = _train(spec, partition, machine, direct=direct)
        context = make_context(spec, partition.layout, "", _SSDS)
        swapped = {
            block: tensors[: len(tensors) // case.num_microbatches]
            for (step, block), tensors in machine.swapped.items()
            if step == 2
        }
        work = Work(
            compute_s=compute_seconds(context, product_s),
            swapped_nbytes=swapped,
            head_slices=-(-num_tokens // num_slice_tokens(spec.training.head_slices, partition.layout.vocab_size)),
        )
        steps = simulate(context, job_shape(context, context.spec.output_dir), _rates(case), work)
    simulated = Run(
        step_s=statistics.fmean(step.summary["period_s"] for step in steps[_INNER]),
        # A span that lasts into the next step occurs in both steps.
        nbytes=_decided(dict.fromkeys(span for step in steps for span in step.spans)),
    )
    return Comparison(real=real, simulated=simulated)


def _spec(case: Case, folder: Path) -> JobSpec:
    """Returns a job with states on two SSDs. Writes its model and tokens if no earlier case has."""
    kind = folder / ("tied" if case.is_tied else "plain")
    shape = ModelShape(
        hidden=64,
        num_layers=NUM_LAYERS,
        vocab=128,
        intermediate=128,
        num_heads=4,
        num_key_value_heads=2,
        is_tied=case.is_tied,
    )
    workload = Workload(
        shape=shape,
        batch_size=BATCH_SIZE,
        sequence_length=LENGTH,
        num_warmup_steps=0,
        num_timed_steps=NUM_STEPS,
        num_threads=1,
        seed=1,
    )
    if not (kind / MODEL_DIR).exists():
        workload.write_here(kind)
    spec = job_spec(workload, kind, kind / "job", [kind / f"ssd{i}" for i in range(len(_SSDS))])
    spec = spec.with_training(
        num_microbatches=case.num_microbatches,
        lanes=case.lanes,
        clip_norm=case.clip_norm,
        precision=case.precision,
        accumulation_precision=case.precision,
        kernel=Kernel.FUSED,  # do not compile a kernel for updates this small
    )
    depths = QueueDepths(leaving_nbytes=_LEAVING_NBYTES)
    if case.num_slots is not None:
        depths = replace(depths, states=case.num_slots)
    return replace(
        spec,
        placement=replace(case.placement, depths=depths),
        kernel_dir=None,
        num_ranks=case.num_ranks,
        compute_threads=1,
        optimizer_threads=1,
    )


def _train(spec: JobSpec, partition: Partition, machine: SlowMachine, *, direct: bool) -> Run:
    spans: list[WorkSpan] = []

    def look(_: ActorName, message: Message) -> None:
        if isinstance(message, SpansReported):
            spans.extend(message.spans)

    for name in (spec.job_dir, *spec.ssd_dirs):
        Path(name).mkdir(exist_ok=True)
    try:
        # Skip the architecture check, because it computes too and would be slow.
        with patch.object(gpu_worker, "check_architecture", lambda *_: None), machine.running():
            outcome = run_local(spec, partition=partition, ssds=_SSDS, direct=direct, on_message=look)
        if outcome["status"] != "succeeded":
            raise CaseFailedError(f"the job ended as {outcome['status']}: {outcome['error']}")
        records = read_journal(Path(spec.job_dir) / JOURNAL_FILE)
        timelines = [record.data["timeline"] for record in records if record.kind == METRICS]
    finally:
        for name in (spec.job_dir, *spec.ssd_dirs):
            shutil.rmtree(name)
    return Run(step_s=statistics.fmean(each["period_s"] for each in timelines[_INNER]), nbytes=_decided(spans))


def _rates(case: Case) -> Rates:
    ssd_rates = (case.ssd_bytes or math.inf,) * len(_SSDS)
    return Rates(
        h2d_bytes=case.h2d_bytes,
        d2h_bytes=case.d2h_bytes,
        ssd_read_bytes=ssd_rates,
        ssd_write_bytes=ssd_rates,
        optimizer_params=case.optimizer_params or math.inf,
        device_params=math.inf,
        launches_ahead=False,
    )


def compute_seconds(context: JobContext, product_s: float) -> dict[tuple[Phase, int], float]:
    """Returns the compute seconds of operations. `product_s`: of one param with all tokens of a micro-batch."""
    layers, seconds = context.plan.layer_activations, {}
    for block in context.layout.blocks:
        # A tied head uses the embedding's matrix.
        shared = context.layout.shared[block.index]
        matrices = 0 if block.index == 0 else sum(context.layout.blocks[each].decay_numel for each in shared)
        forward_s = matrices * product_s * context.plan.group_size
        is_layer = 1 <= block.index <= len(layers)
        again_s = forward_s if not is_layer or layers[block.index - 1].recompute else 0.0
        seconds[(Phase.FORWARD, int(block.index))] = forward_s
        seconds[(Phase.HEAD, int(block.index))] = 3 * forward_s
        seconds[(Phase.BACKWARD, int(block.index))] = again_s + 2 * forward_s
    return seconds


def _decided(spans: Iterable[WorkSpan]) -> DecidedNbytes:
    nbytes: dict[tuple[SpanKind, int, int], int] = defaultdict(int)
    for span in spans:
        if span.kind in _DECIDED and 1 < span.step < NUM_STEPS:
            nbytes[(span.kind, span.block, span.step)] += span.nbytes
    return dict(nbytes)
