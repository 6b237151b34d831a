"""Runs one job of `benchmarks.scheduler`: its bottleneck, its order, its bound, and its real and simulated times."""

import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.windlass_runner import job_spec
from benchmarks.peers.workload import MODEL_DIR, Workload
from benchmarks.scheduler.throttle import BACKWARD_FLOP, FORWARD_FLOP, HEAD_FLOP, Throttle
from windlass.actors.job import JOURNAL_FILE, JobSpec, SsdFacts, make_context, read_journal
from windlass.actors.job.journal import METRICS
from windlass.actors.messages import Message, Phase
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.scheduler import job_shape
from windlass.actors.timeline import FROM_DEVICE, TO_DEVICE
from windlass.actors.worker_policy import Ordering, QueueOrder
from windlass.engine.model import CHUNK_GRANULE, ModelLayout, Partition, build_meta_model, load_config
from windlass.planner.simulation.simulate import Rates, Work, simulate
from windlass.storage.ids import ActorName, Kernel, Precision
from windlass.storage.io import Backend, IoSettings

# Minimum bytes that an update moves per parameter with fp32 states: master and moments in; these and the param out.
_UPDATE_NBYTES = 12 + 14
_CHUNKS_A_LAYER = 2
# Two transfers in flight: one moves at the SSD's rate while the next one is prepared.
_SSDS = (SsdFacts(io=IoSettings(backend=Backend.THREADS, num_threads=2, depth=1, piece_nbytes=1 << 20), weight=1),)


class CaseFailedError(Exception):
    """Raised if a job did not end with a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The throttled resource beside the compute, and its time as a multiple of the compute time."""

    resource: str  # "optimizer" or "ssd"
    over_compute: float

    @property
    def name(self) -> str:
        """The name for files and tables."""
        return f"{self.resource}-{self.over_compute:g}"

    @property
    def actor(self) -> ActorName:
        """The throttled actor."""
        return ActorName(f"{self.resource}-0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train."""

    bottleneck: Bottleneck
    clips: bool
    queues: QueueOrder = QueueOrder.PRIORITY
    overlaps_steps: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The compute time of a step on the throttled machine, and a step's real work. The rates follow from them."""

    compute_s: float  # throttled
    ssd_nbytes: int  # read and written in a step
    layout: ModelLayout
    num_tokens: int  # of a step

    @property
    def flop(self) -> tuple[int, int, int]:
        """The FLOP of a step's forward pass, of its backward pass, and of the head between them."""
        *layers, head = (block.numel * self.num_tokens for block in self.layout.blocks)
        return FORWARD_FLOP * sum(layers), BACKWARD_FLOP * sum(layers), HEAD_FLOP * head

    def throttle(self, bottleneck: Bottleneck) -> Throttle:
        """Returns the rates of a machine with this bottleneck."""
        bottleneck_s = bottleneck.over_compute * self.compute_s
        compute_flop_per_s = sum(self.flop) / self.compute_s
        if bottleneck.resource == "optimizer":
            rate = self.layout.numel / bottleneck_s
            return Throttle(compute_flop_per_s=compute_flop_per_s, optimizer_params_per_s=rate)
        return Throttle(compute_flop_per_s=compute_flop_per_s, ssd_bytes_per_s=self.ssd_nbytes / bottleneck_s)

    def chain_s(self, bottleneck: Bottleneck, *, clips: bool) -> float:
        """Returns the minimum time between a step's gradients and the next step's ones, if steps overlap.

        From the first gradient (with clipping: the last one), all updates must run one after the other before the next
        step's head. The reason is that every earlier forward operation waits for its own update.
        """
        throttle = self.throttle(bottleneck)
        assert throttle.compute_flop_per_s is not None
        _, backward_s, head_s = (flop / throttle.compute_flop_per_s for flop in self.flop)
        if throttle.optimizer_params_per_s is not None:
            update_s = self.layout.numel / throttle.optimizer_params_per_s
        else:
            assert throttle.ssd_bytes_per_s is not None
            update_s = _UPDATE_NBYTES * self.layout.numel / throttle.ssd_bytes_per_s
        return update_s + head_s + (backward_s if clips else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The step times and busy times of the timed steps, from their timelines."""

    step_s: tuple[float, ...]
    busy_s: Mapping[str, float]  # of each resource, a step
    cycle_s: float  # longest dependency cycle of a block

    @property
    def mean_step_s(self) -> float:
        """The mean step time. It is exact even if one step shifts work to the next."""
        return statistics.fmean(self.step_s)

    @property
    def busiest(self) -> str:
        """The resource with the longest busy time."""
        return max(self.busy_s, key=lambda resource: self.busy_s[resource])

    @property
    def efficiency(self) -> float:
        """The busiest resource's busy time, as a share of the step."""
        return self.busy_s[self.busiest] / self.mean_step_s


class Bench:
    """Trains one model in many ways, in this process."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        self._folder = folder
        self._workload = workload
        self._free: list[dict[str, Any]] = []  # timelines of the reference's steps
        workload.write_here(folder)

    def reference(self, compute_s: float, spec: JobSpec | None = None) -> tuple[Reference, Result]:
        """Trains `spec`, or the plain job, without throttles. Returns the work of a step, and the measured result."""
        layout = self._partition().layout
        metrics = self.train(spec or self.spec(), Throttle())
        self._free = [data["timeline"] for data in metrics]
        # Counted from the start of the job.
        moved = [data["ssd_bytes_read"] + data["ssd_bytes_written"] for data in metrics]
        nbytes = (moved[-1] - moved[0]) // (len(moved) - 1)
        num_tokens = self._workload.batch_size * self._workload.sequence_length
        reference = Reference(compute_s=compute_s, ssd_nbytes=nbytes, layout=layout, num_tokens=num_tokens)
        return reference, result_of(metrics, Throttle())

    def measure(self, case: Case, reference: Reference) -> Result:
        """Trains in one way. Steps that do not overlap are alike, so only one of them is timed."""
        throttle = reference.throttle(case.bottleneck)
        return result_of(self.train(self._spec_of(case), throttle), throttle)

    def simulate(self, case: Case, reference: Reference) -> float:
        """Returns the mean simulated seconds of the timed steps of a case."""
        return self.predict(self._spec_of(case), reference, reference.throttle(case.bottleneck))

    def predict(self, spec: JobSpec, reference: Reference, throttle: Throttle) -> float:
        """Returns the mean simulated seconds of a job's timed steps.

        Resources without a throttle have the rates of the reference. All GPU workers compute at the full rate.
        """
        context = make_context(spec, reference.layout, "", _SSDS)
        ssd_rate = throttle.ssd_bytes_per_s or self._free_rate("ssd-0")
        update_s = statistics.fmean(timeline["busy_s"]["optimizer-0"] for timeline in self._free)
        rates = Rates(
            h2d_bytes=self._free_rate(TO_DEVICE),
            d2h_bytes=self._free_rate(FROM_DEVICE),
            ssd_read_bytes=(ssd_rate,),
            ssd_write_bytes=(ssd_rate,),
            optimizer_params=throttle.optimizer_params_per_s or reference.layout.numel / update_s,
            device_params=math.inf,  # no states are resident there
        )
        assert throttle.compute_flop_per_s is not None
        flop = {Phase.FORWARD: FORWARD_FLOP, Phase.BACKWARD: BACKWARD_FLOP, Phase.HEAD: HEAD_FLOP}
        num_tokens = reference.num_tokens * context.plan.group_size / spec.training.num_microbatches
        compute_s: dict[tuple[Phase, int], float] = {
            (phase, block.index): flop[phase] * block.numel * num_tokens / throttle.compute_flop_per_s
            for phase in flop
            for block in reference.layout.blocks
        }
        steps = simulate(context, job_shape(context, context.spec.output_dir), rates, Work(compute_s=compute_s))
        return statistics.fmean(step.summary["period_s"] for step in steps[self._workload.num_warmup_steps :])

    def _free_rate(self, resource: str) -> float:
        """Returns the bytes per second of a resource in the reference, while it was busy."""
        moved = sum(timeline["moved_bytes"][resource] for timeline in self._free)
        return float(moved / sum(timeline["busy_s"][resource] for timeline in self._free))

    def _spec_of(self, case: Case) -> JobSpec:
        spec = self.spec()
        ordering = Ordering(queues=case.queues, overlaps_steps=case.overlaps_steps)
        num_steps = spec.training.total_steps if case.overlaps_steps else self._workload.num_warmup_steps + 1
        spec = spec.with_training(clip_norm=1.0 if case.clips else None, total_steps=num_steps)
        return replace(spec, ordering=ordering)

    def spec(self) -> JobSpec:
        """Returns the job in the plain way: one micro-batch on one GPU worker."""
        spec = job_spec(self._workload, self._folder, self._folder / "job", [self._folder / "ssd"])
        # Do not compile a kernel for updates this small.
        spec = spec.with_training(kernel=Kernel.FUSED)
        return replace(spec, kernel_dir=None, compute_threads=1, optimizer_threads=1)

    def _partition(self) -> Partition:
        chunk_numel = -(-self._workload.shape.num_layer_params // _CHUNKS_A_LAYER)
        model = build_meta_model(load_config(str(self._folder / MODEL_DIR)), Precision.BF16)
        return Partition(model, -(-chunk_numel // CHUNK_GRANULE) * CHUNK_GRANULE)

    def train(
        self, spec: JobSpec, throttle: Throttle, on_message: Callable[[ActorName, Message], None] | None = None
    ) -> list[dict[str, Any]]:
        """Trains a job and returns the metrics of its timed steps. `on_message`: see `run_local`."""
        for name in (spec.job_dir, *spec.ssd_dirs):
            Path(name).mkdir(exist_ok=True)
        try:
            with throttle.holding_back():
                outcome = run_local(spec, partition=self._partition(), ssds=_SSDS, on_message=on_message)
            if outcome["status"] != "succeeded":
                raise CaseFailedError(f"the job ended as {outcome['status']}: {outcome['error']}")
            records = read_journal(Path(spec.job_dir) / JOURNAL_FILE)
            return [
                record.data
                for record in records
                if record.kind == METRICS and record.data["step"] > self._workload.num_warmup_steps
            ]
        finally:
            shutil.rmtree(spec.job_dir)


def result_of(metrics: Sequence[Mapping[str, Any]], throttle: Throttle) -> Result:
    """Returns the result of some steps.

    Transfers are reported only when their whole request is done. So an SSD's busy time is computed from its bytes.
    """
    timelines = [data["timeline"] for data in metrics]
    busy_s = {
        name: statistics.fmean(timeline["busy_s"][name] for timeline in timelines) for name in timelines[0]["busy_s"]
    }
    if throttle.ssd_bytes_per_s is not None:
        for name in (each for each in busy_s if each.startswith("ssd-")):
            nbytes = statistics.fmean(timeline["moved_bytes"][name] for timeline in timelines)
            busy_s[name] = nbytes / throttle.ssd_bytes_per_s
    return Result(
        step_s=tuple(timeline["period_s"] for timeline in timelines),
        busy_s=busy_s,
        cycle_s=statistics.median(timeline["dependency_bound_s"] for timeline in timelines),
    )
