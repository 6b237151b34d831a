"""Writes an attempt's metrics, messages and checkpoints into the job's journal."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.actors.job import (
    NUM_FIRST_STEPS,
    Journal,
    Pace,
    StepTimes,
    actor_in_words,
    pace_of_attempt,
    read_journal,
)
from windlass.actors.lifecycle import ReportTimer
from windlass.actors.messages import (
    BlockComputed,
    ComputeProgressed,
    ExportProgressed,
    GradReady,
    KernelChosen,
    LoadProgressed,
    Loss,
    MemoryReported,
    Message,
    ModelExported,
    ModelKernelsChosen,
    Phase,
    SpanKind,
    SpansReported,
    StoreCommitted,
)
from windlass.actors.policy import SchedulerConfig, StepEnd, UnexpectedEventError, fold
from windlass.actors.timeline import FOLDER, Measured, Timeline, keep_step
from windlass.engine.checkpoint import folder_nbytes
from windlass.storage.ids import ActorName

# The names of the bytes of offloaded activations in a step's metrics.
_ACTIVATION_BYTES = {
    SpanKind.COPY_ACTIVATIONS_OUT: "activation_bytes_out",
    SpanKind.COPY_ACTIVATIONS_IN: "activation_bytes_in",
}
_CHECKPOINT_METRICS = (
    "train_loss",
    "train_mean_token_accuracy",
    "valid_loss",
    "full_valid_loss",
    "valid_mean_token_accuracy",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SsdBytes:
    """The bytes that one SSD has transferred, as of its last commit."""

    step: int  # of that commit
    read: int  # since the attempt began
    written: int
    written_a_step: int | None = None  # mean per step since the previous commit; None until two steps are committed


@dataclass(slots=True)
class _History:
    """The facts that earlier attempts wrote into the journal."""

    steps: set[int]  # steps with a training loss
    evaluated: set[int]  # steps with a validation loss
    ssd_bytes_written_by_ssd: list[int]  # as of the last step; zeros if the number of SSDs has changed
    ssd_bytes_read: int = 0  # by all SSDs that the job has had, as of the last step
    ssd_bytes_written: int = 0
    measured: dict[str, Any] | None = None  # the resources that the job had used


def _history(journal: Path, num_ssds: int) -> _History:
    history = _History(set(), set(), [0] * num_ssds)
    attempt = num_read_before = 0
    for record in read_journal(journal):
        if record.attempt != attempt:
            attempt, num_read_before = record.attempt, history.ssd_bytes_read
        if "train_loss" in record.data:
            history.steps.add(record.data["step"])
        if "valid_loss" in record.data:
            history.evaluated.add(record.data["step"])
        history.measured = record.data.get("measured", history.measured)
        if "ssd_bytes_read" not in record.data:
            continue
        written = record.data.get("ssd_bytes_written_by_ssd", ())
        num_read, num_written = record.data["ssd_bytes_read"], record.data["ssd_bytes_written"]
        # Earlier releases wrote the attempt's totals, and the job's written bytes only per SSD.
        of_attempt = num_written < sum(written)
        history.ssd_bytes_read = num_read + num_read_before if of_attempt else num_read
        history.ssd_bytes_written = max(num_written, sum(written))
        if len(written) == num_ssds:  # else the job had other SSDs
            history.ssd_bytes_written_by_ssd = written
    return history


class Progress:
    """Collects the facts about steps from events and reports them in the journal.

    A step is reported when it is committed or, if no commit is due, when it is over.
    """

    def __init__(
        self,
        shape: SchedulerConfig,
        journal: Journal,
        *,
        num_params: int,
        initial_step: int | None,
        scales_loss: bool,
        on_evaluation: Callable[[int, float | None], None],
        expected_pace: Pace | None = None,
        boxes: Sequence[str] = (),
    ) -> None:
        """`initial_step` is the commit from which the attempt resumes. `expected_pace` is the expected time of a step.

        `on_evaluation` is called with a step and its validation loss (None if not finite) as soon as that is known.
        `boxes`: the names of the boxes of a job over several; empty if there is one.
        """
        self._on_evaluation = on_evaluation
        self._expected_pace = expected_pace
        self._shape = shape
        self._boxes = boxes
        self._journal = journal
        self._num_params = num_params
        self._scales_loss = scales_loss
        self._history = _history(journal.path, len(shape.ssd_servers))
        self._started_s = 0.0
        self._step_began_s = 0.0
        self._first_step = (initial_step or 0) + 1
        self._is_loaded = initial_step is not None  # the initial states are in the tensor store
        self._load_timer = ReportTimer()
        self._export_timers: dict[int, ReportTimer] = {}  # by step
        self._measured = Measured(self._first_step, self._history.measured)
        self._step_times = StepTimes()  # of the first steps, and from the first steady step on of the steady ones
        self._num_tokens = 0  # trained on in all steps that are over
        self.trained_tokens = 0  # trained on in all reported steps
        self._last_reported = initial_step or 0  # the last reported step
        self._losses: dict[int, dict[int, Loss]] = {}  # by step and group
        self._metrics: dict[int, dict[str, Any]] = {}  # by step, for steps that are over but not reported
        self._compute_s: dict[int, dict[ActorName, float]] = {}  # by step and GPU worker, evaluation included
        self._swapped: dict[int, dict[SpanKind, int]] = {}  # by step: bytes of offloaded activations by direction
        self._kernels: set[str] = set()  # update kernels of all attempts at this job
        self._model_kernels: list[str] = []  # the same in all attempts
        self._not_finite: dict[int, str] = {}  # by step: the first result that was not finite
        self._evaluations: dict[int, dict[int, Loss]] = {}  # by step and group
        self._last_metrics: dict[str, Any] = {}  # of the last reported step
        self._evaluation: dict[str, Any] = {"step": 0}  # metrics of the last evaluation
        self._timeline = Timeline(
            shape.num_blocks,
            keeps_grads=shape.keeps_grads,
            overlaps_steps=shape.ordering.overlaps_steps,
            boxes=boxes,
        )
        self._keeps_spans = True
        self._ssd_bytes: dict[ActorName, _SsdBytes] = {}  # empty until the model is loaded
        if initial_step is not None:
            nothing = _SsdBytes(step=initial_step, read=0, written=0)
            self._ssd_bytes = dict.fromkeys(shape.ssd_servers, nothing)

    @property
    def last_step_in_journal(self) -> int:
        """The last step that any attempt has reported; 0 if there is none."""
        return max(self._history.steps, default=0)

    def begin(self, resumed: dict[str, Any] | None) -> None:
        """Reports the start of the attempt. `resumed` is the state in its commit, as `end_step` returned it.

        It also reports the committed step if the attempt before died before it could.
        """
        self._started_s = self._step_began_s = time.monotonic()
        self._timeline.begin(self._started_s)
        if resumed is None:
            self._journal.append("message", "Loading the model's weights into the tensor store")
            return
        self._num_tokens = self.trained_tokens = resumed["trained_tokens"]
        self._kernels = set(resumed["kernels"])
        self._model_kernels = resumed.get("model_kernels", [])
        self._journal.append("message", f"Resuming after step {self._last_reported}")
        if resumed["metrics"]:
            data: dict[str, Any] = {
                "step": self._last_reported,
                "total_steps": self._shape.total_steps,
                **resumed["metrics"],
            }
            data["trained_tokens"] = self.trained_tokens
            data |= self._ssd_metrics()
            self._last_metrics = data
            if self._last_reported not in self._history.steps:
                self._journal.append("metrics", self._step_message(data), **data)

    def end_step(self, step: int, end: StepEnd | None) -> dict[str, Any]:
        """Collects the metrics of a step as soon as its result is known. `end` is None for step 0.

        Returns the state that the step's commit stores for `begin`.
        """
        kept: dict[str, Any] = {}
        if end is not None:
            data = self._metrics[step] = self._take_stock(step, end)
            kept = {name: data[name] for name in ("train_loss", "train_mean_token_accuracy", "grad_norm")}
        return {
            "kernels": sorted(self._kernels),
            "model_kernels": self._model_kernels,
            "trained_tokens": self._num_tokens,
            "metrics": kept,
        }

    def _tell_loaded(self, event: LoadProgressed) -> None:
        """Reports the loading of weights, but only every few seconds, because several actors may send its events.

        The states of an actor may be those of blocks without params. Then there is nothing to report.
        """
        total = event.total_params
        if not total or not self._load_timer.restart_if_due(time.monotonic()):
            return
        share, whose = f"{event.num_params / total:.0%}", "" if total == self._num_params else "its "
        done, what = "loaded", f"{share} of {whose}{total:,} parameters"
        if self._is_loaded:  # from the SSDs, states that rest in memory
            done, what = "read", f"{share} of the states of {whose}{total:,} parameters into memory"
        text = f"{self._named(event.actor)} has {done} {what}" if whose else f"{done.capitalize()} {what}"
        self._journal.append("message", text)

    def _tell_exported(self, event: ExportProgressed) -> None:
        """Reports an export every few seconds. A short one is over before its first report."""
        now_s = time.monotonic()
        timer = self._export_timers.setdefault(event.step, ReportTimer(now_s))
        if timer.restart_if_due(now_s):
            how = "syncing its files to the disk" if event.share == 1.0 else f"{event.share:.0%} written"
            self._journal.append("message", f"Exporting the model of step {event.step}: {how}")

    def model_loaded(self) -> None:
        """Reports that the weights of all boxes are in the tensor store."""
        now_s = time.monotonic()
        text = f"Loaded {self._num_params:,} parameters in {now_s - self._started_s:.1f} s; training begins"
        self._journal.append("message", text)
        self._is_loaded = True
        self._step_began_s = now_s
        self._timeline.begin(now_s)

    def note(self, event: Message) -> None:
        """Processes an event."""
        match event:
            case LoadProgressed():
                self._tell_loaded(event)
            case ExportProgressed():
                self._tell_exported(event)
            case SpansReported():
                self._timeline.add(event.spans)
                self._note_swapped(event)
            case MemoryReported():
                self._measured.note_memory(event)
            case KernelChosen():
                self._on_kernel_chosen(event)
            case ModelKernelsChosen():
                self._model_kernels = [str(kernel) for kernel in event.kernels]
                kernels = " and ".join(event.kernels)
                self._journal.append("message", f"{self._named(event.actor)} computes with {kernels}")
            case ComputeProgressed():
                for computed in event.computed:
                    self._on_computed(computed, event.actor)
                for grad in event.grads:
                    self._on_grad(grad)
            case StoreCommitted():
                self._on_store_committed(event)

    def first_not_finite(self, step: int) -> str:
        """Returns a description of the first result of a step that was not finite."""
        return self._not_finite[step]

    def report_up_to(self, step: int) -> None:
        """Reports all steps up to this one. They must be complete."""
        while self._last_reported < step:
            self._last_reported += 1
            self._report_step(self._last_reported)

    def report_export(self, event: ModelExported, reasons: list[str], kept: list[tuple[int, list[str]]]) -> None:
        """Reports an export. `kept` has the steps of all checkpoints that are kept from now on, with their reasons."""
        metrics = {"step": event.step}
        for reported in (self._last_metrics, self._evaluation):
            if reported.get("step") == event.step:
                metrics |= {name: reported[name] for name in _CHECKPOINT_METRICS if name in reported}
        folder = Path(event.path)
        self._journal.append(
            "checkpoint",
            f"Checkpoint of step {event.step} written",
            step_number=event.step,
            fine_tuned_model_checkpoint=folder.name,
            path=event.path,
            metrics=metrics,
            nbytes=folder_nbytes(folder),
            reasons=reasons,
            kept=kept,
        )

    # --- inside -----------------------------------------------------------------------------------------------------

    def _take_stock(self, step: int, end: StepEnd) -> dict[str, Any]:
        losses, now_s = self._losses.pop(step), time.monotonic()
        groups = [losses[group] for group in sorted(losses)]
        num_targets = groups[0].num_targets
        step_s, self._step_began_s = now_s - self._step_began_s, now_s
        self._num_tokens += num_targets
        return {
            "step": step,
            "total_steps": self._shape.total_steps,
            "train_loss": _finite(fold(term for group in groups for term in group.terms) / num_targets),
            "train_mean_token_accuracy": sum(group.num_correct for group in groups) / num_targets,
            "learning_rate": self._shape.learning_rate(step),
            "grad_norm": _finite(end.grad_norm),
            "loss_scale": end.loss_scale,
            "skipped_steps": end.num_skipped,
            "step_s": step_s,
            "tokens_per_s": num_targets / step_s,
            "trained_tokens": self._num_tokens,
        }

    def _on_store_committed(self, event: StoreCommitted) -> None:
        before, a_step = self._ssd_bytes.get(event.actor), None
        if before is not None and event.step > before.step:
            a_step = (event.bytes_written - before.written) // (event.step - before.step)
        self._ssd_bytes[event.actor] = _SsdBytes(
            step=event.step, read=event.bytes_read, written=event.bytes_written, written_a_step=a_step
        )

    def _note_swapped(self, event: SpansReported) -> None:
        for span in event.spans:
            if span.kind in _ACTIVATION_BYTES:
                of_step = self._swapped.setdefault(span.step, dict.fromkeys(_ACTIVATION_BYTES, 0))
                of_step[span.kind] += span.nbytes

    def _named(self, actor: ActorName) -> str:
        gpu_workers = self._shape.gpu_workers
        if self._boxes:
            return actor_in_words(actor, self._boxes)
        if actor not in gpu_workers:
            return f"The actor {actor}"
        # A single GPU worker has the same name on machines without a GPU.
        return "The device" if len(gpu_workers) == 1 else f"GPU {gpu_workers.index(actor)}"

    def _on_kernel_chosen(self, event: KernelChosen) -> None:
        self._journal.append("message", f"{self._named(event.actor)} updates with the {event.kernel} kernel")
        if others := self._kernels - {event.kernel}:
            self._journal.append(
                "message",
                f"Other states of this job were updated with the {', '.join(others)} kernel: the results may differ in "
                "the last bit from those of one kernel",
                level="warn",
            )
        self._kernels.add(event.kernel)

    def _on_computed(self, event: BlockComputed, actor: ActorName) -> None:
        of_step = self._compute_s.setdefault(event.step, {})
        of_step[actor] = of_step.get(actor, 0.0) + event.compute_s
        match event.phase:
            case Phase.FORWARD if not event.is_finite:
                self._not_finite.setdefault(event.step, f"the {event.phase} of block {event.block}")
            case Phase.HEAD:
                # If a loss is not finite, the gradients are not either.
                self._losses.setdefault(event.step, {})[event.group] = _loss_of(event, actor)
                if not event.is_finite:
                    self._not_finite.setdefault(event.step, f"the head of block {self._shape.num_blocks - 1}")
            case Phase.EVALUATE_HEAD:
                self._on_evaluated(event, actor)

    def _on_grad(self, event: GradReady) -> None:
        if not event.is_finite:
            self._not_finite.setdefault(event.step, f"the gradient of block {event.block}")

    def _on_evaluated(self, event: BlockComputed, actor: ActorName) -> None:
        groups = self._evaluations.setdefault(event.step, {})
        if event.group in groups:
            raise UnexpectedEventError(
                f"{actor} reported the loss of group {event.group} in the evaluation of step {event.step} a second time"
            )
        groups[event.group] = _loss_of(event, actor)
        if len(groups) < self._shape.num_evaluation_groups:
            return
        del self._evaluations[event.step]
        in_order = [groups[group] for group in sorted(groups)]
        num_targets = sum(group.num_targets for group in in_order)
        loss = _finite(fold(fold(group.terms) for group in in_order) / num_targets)
        data: dict[str, Any] = {
            "step": event.step,
            "total_steps": self._shape.total_steps,
            "valid_loss": loss,
            "full_valid_loss": loss,
            "valid_mean_token_accuracy": sum(group.num_correct for group in in_order) / num_targets,
        }
        if event.step not in self._history.evaluated:
            message = f"Step {event.step}: validation loss={_in_words(loss)}"
            self._journal.append("metrics", message, **data)
        self._evaluation = data
        self._on_evaluation(event.step, loss)

    def _report_step(self, step: int) -> None:
        """Reports a step that is committed or, if no commit is due, over."""
        data = self._metrics.pop(step)
        self.trained_tokens = data["trained_tokens"]
        elapsed_s = time.monotonic() - self._started_s
        # GPU workers compute at the same time, so the busiest one's time counts.
        data["compute_s"] = max(self._compute_s.get(step, {}).values(), default=0.0)
        self._compute_s = {later: seconds for later, seconds in self._compute_s.items() if later > step}
        swapped = self._swapped.get(step, {})
        self._swapped = {later: nbytes for later, nbytes in self._swapped.items() if later > step}
        data |= {name: swapped.get(kind, 0) for kind, name in _ACTIVATION_BYTES.items()}
        data["elapsed_s"] = elapsed_s
        data |= self._time_left(step, data["step_s"])
        data |= self._ssd_metrics() | self._where_time_went(step)
        data["measured"] = self._measured.data
        self._last_metrics = data
        where = self._not_finite.pop(step, None)
        if data["grad_norm"] is None:
            text = f"Step {step} skipped: {where} was not finite"
            if self._scales_loss:
                text += f"; the loss was scaled by {data['loss_scale']:g}"
            self._journal.append("message", text, level="warn")
        self._journal.append("metrics", self._step_message(data), **data)

    def _time_left(self, step: int, step_s: float) -> dict[str, Any]:
        """Returns the metrics of the remaining time, from the times of the last steps, and of evaluations.

        Loading does not count. The first steps count only until there are later ones. `remaining_s` is null if no
        number is reliable. `remaining_is_estimate` is true if it is not based on enough measured steps, or if
        evaluations are due and none was measured. `pace_s` and `evaluation_s` are for the next attempt.
        """
        if step == self._first_step + NUM_FIRST_STEPS:
            self._step_times = StepTimes()
        evaluated = step > self._first_step and self._shape.is_evaluated(step - 1)
        self._step_times.note(step_s, evaluated=evaluated)
        num_left = self._shape.total_steps - step
        if not num_left:
            return {"remaining_s": 0.0, "remaining_is_estimate": False}
        # The very first steady steps may all have evaluations.
        mean_s = step_s if self._step_times.mean_s is None else self._step_times.mean_s
        pace = pace_of_attempt(step - self._first_step + 1, mean_s, self._expected_pace)
        if pace is None:
            return {"remaining_s": None, "remaining_is_estimate": True}
        evaluation_s, num_evaluations = self._evaluation_s(step), self._shape.num_evaluations_from(step)
        return {
            "remaining_s": pace.step_s * num_left + num_evaluations * (evaluation_s or 0.0),
            "remaining_is_estimate": not pace.is_measured or (num_evaluations > 0 and evaluation_s is None),
            "pace_s": pace.step_s,
            "evaluation_s": evaluation_s,
        }

    def _evaluation_s(self, step: int) -> float | None:
        """Returns the time by which an evaluation makes a step longer; None if none was measured."""
        if self._shape.evaluate_every == 1:
            return 0.0  # every step has one, so the time of a step includes it
        measured = self._step_times.evaluation_s
        earlier = None if self._expected_pace is None else self._expected_pace.evaluation_s
        is_steady = step - self._first_step >= NUM_FIRST_STEPS
        first, second = (measured, earlier) if is_steady else (earlier, measured)
        return second if first is None else first

    def _ssd_metrics(self) -> dict[str, Any]:
        """Returns the SSD traffic as of the last commit. The totals cover all attempts, including repeated steps.

        The bytes per step are the mean since the previous commit, and missing until they are known.
        """
        ssds = [self._ssd_bytes[name] for name in self._shape.ssd_servers]
        data: dict[str, Any] = {
            "ssd_bytes_read": self._history.ssd_bytes_read + sum(ssd.read for ssd in ssds),
            "ssd_bytes_written": self._history.ssd_bytes_written + sum(ssd.written for ssd in ssds),
            "ssd_bytes_written_by_ssd": [
                before + ssd.written for before, ssd in zip(self._history.ssd_bytes_written_by_ssd, ssds, strict=True)
            ],
        }
        a_step = [ssd.written_a_step for ssd in ssds if ssd.written_a_step is not None]
        if len(a_step) == len(ssds):
            data |= {"ssd_bytes_written_step": sum(a_step), "ssd_bytes_written_step_by_ssd": a_step}
        return data

    def _where_time_went(self, step: int) -> dict[str, Any]:
        """Returns the timeline's summary for the step's metrics, and writes the step's spans to a file."""
        timeline = self._timeline.end_step(step)
        if timeline is None:
            return {}
        self._measured.note_step(timeline)
        if self._keeps_spans:
            try:
                keep_step(self._journal.path.parent / FOLDER, timeline)
            except OSError as error:  # no reason to fail the job
                self._keeps_spans = False
                self._journal.append("message", f"Timelines are no longer written: {error}", level="warn")
        return {"timeline": timeline.summary}

    def _step_message(self, data: dict[str, Any]) -> str:
        return f"Step {data['step']}/{self._shape.total_steps}: training loss={_in_words(data['train_loss'])}"


def _loss_of(event: BlockComputed, actor: ActorName) -> Loss:
    if event.loss is None:
        where = f"the {event.phase} of block {event.block} in step {event.step}"
        raise UnexpectedEventError(f"{actor} reported {where} without its loss")
    return event.loss


def _finite(number: float) -> float | None:
    """Replaces infinities and NaN by None, because JSON has neither."""
    return number if math.isfinite(number) else None


def _in_words(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"
