"""The runner of a job: feeds the policy with events, carries its instructions out, keeps the journal.

A thin shell: what runs when is decided in `actors/policy/pipeline.py`. It imports no torch.
"""

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.actors.context import GPU_WORKER, JobContext, num_evaluation_groups, optimizer_name, ssd_name
from windlass.actors.job_spec import UpdateOrder
from windlass.actors.journal import Journal, read_journal
from windlass.actors.messages import (
    ActorFailed,
    Announcement,
    BlockBackwardDone,
    BlockComputed,
    KernelChosen,
    LoadProgressed,
    LossComputed,
    Message,
    ModelExported,
    ModelLoaded,
    Phase,
    StoreCommitted,
)
from windlass.actors.policy.pipeline import NotFiniteError, Pipeline
from windlass.actors.policy.shape import JobShape
from windlass.actors.policy.trainer import Trainer
from windlass.actors.policy.waits import DeadlineMissedError, Instruction, UnexpectedEventError
from windlass.engine.learning_rate import learning_rate
from windlass.storage.ids import ActorName, Precision
from windlass.storage.store_format import CommitRecord

# How often deadlines and lost actors are looked for.
_TICK_S = 1.0


# The outcome of an attempt that was lost through no fault of the job's: another can go on from the last commit.
INTERRUPTED = "interrupted"


class JobFailedError(Exception):
    """The attempt ended without a model; the text is for people."""


class ActorLostError(Exception):
    """A process of the job is gone; the text is for people."""


@dataclass(slots=True)
class _Losses:
    """Sums over the groups of one evaluation."""

    loss_sum: float = 0.0
    num_targets: int = 0
    num_correct: int = 0
    num_groups: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _SsdBytes:
    """What one SSD has moved, as of its last commit."""

    step: int  # the commit's
    read: int  # since the attempt began
    written: int
    written_a_step: int | None = None  # since the commit before; None: there is none with a step in between


def job_shape(context: JobContext, trainer_state: Callable[[int], str]) -> JobShape:
    """What the policy needs to know of a job. `trainer_state`: what a commit of a step keeps for a restart, JSON."""
    spec, layout, hyper, plan = context.spec, context.layout, context.spec.hyperparameters, context.plan

    def rate(step: int) -> float:
        return learning_rate(
            step,
            peak=hyper.learning_rate,
            warmup_steps=hyper.warmup_steps,
            total_steps=spec.total_steps,
            schedule=hyper.schedule,
        )

    return JobShape(
        job=spec.job,
        attempt=spec.attempt,
        chunks=tuple(tuple(layout.chunk_keys(block.index)) for block in layout.blocks),
        shared=layout.shared,
        total_steps=spec.total_steps,
        num_evaluation_groups=num_evaluation_groups(spec),
        evaluate_every=spec.evaluate_every or 0,
        checkpoint_every=spec.checkpoint_every or 0,
        clip_norm=hyper.clip_norm,
        keeps_grads=hyper.keeps_grads,
        updates_alone=hyper.order_of_updates is UpdateOrder.AFTER_BACKWARD,
        max_bad_steps=hyper.max_bad_steps,
        learning_rate=rate,
        trainer_state=trainer_state,
        gpu_worker=GPU_WORKER,
        optimizers=tuple(optimizer_name(i) for i in range(spec.num_cpu_optimizers)),
        ssd_servers=tuple(ssd_name(i) for i in range(len(spec.ssd_dirs))),
        output_dir=spec.output_dir,
        host_blocks=frozenset(plan.host_blocks),
        device_blocks=frozenset(plan.device_blocks),
        spilled_blocks=frozenset(plan.spilled_blocks),
        commit_every=plan.commit_every,
        deadline_s=spec.deadline_s,
    )


@dataclass(slots=True)
class _History:
    """What earlier attempts have told in the journal."""

    steps: set[int]  # whose training loss is there
    ssd_bytes_written: list[int]  # of each SSD, as of the last step


def _history(journal: Path, num_ssds: int) -> _History:
    history = _History(set(), [0] * num_ssds)
    for record in read_journal(journal):
        if "train_loss" in record.data:
            history.steps.add(record.data["step"])
        written = record.data.get("ssd_bytes_written_by_ssd", ())
        if len(written) == num_ssds:  # else of other SSDs
            history.ssd_bytes_written = written
    return history


class Scheduler:
    """Runs one attempt from its first instruction to its outcome."""

    def __init__(
        self,
        context: JobContext,
        send: Callable[[ActorName, Message], None],
        *,
        resume_from: CommitRecord | None = None,
        check_actors: Callable[[], None] | None = None,
    ) -> None:
        """`resume_from`: the commit to go on from. `check_actors` raises ActorLostError when an actor is gone."""
        self.context = context
        self.spec = context.spec
        self._resumed: dict[str, Any] | None = None if resume_from is None else json.loads(resume_from.trainer_state)
        initial_step = None if resume_from is None else resume_from.step
        trainer = Trainer(scales_loss=self.spec.hyperparameters.precision is Precision.FP16)
        if self._resumed is not None:
            trainer.restore(self._resumed["trainer"])
        self.pipeline = Pipeline(job_shape(context, self._end_step), trainer, initial_step)
        self._send = send
        self._check_actors = check_actors
        self._events: queue.Queue[Message] = queue.Queue()
        self._cancelled = threading.Event()
        journal_path = Path(self.spec.job_dir) / "journal.jsonl"
        self._history = _history(journal_path, len(self.spec.ssd_dirs))
        self._journal = Journal(journal_path, self.spec.attempt)
        self._started_s = 0.0
        self._step_began_s = 0.0
        self._first_step = (initial_step or 0) + 1
        self._num_tokens = 0  # trained on in all steps that are over
        self._trained_tokens = 0  # in those that were told of
        self._told = initial_step or 0
        self._losses: dict[int, LossComputed] = {}
        self._metrics: dict[int, dict[str, Any]] = {}  # of steps that are over and not told of
        self._compute_s: dict[int, float] = {}  # of each step, evaluation included
        self._kernels: set[str] = set()  # that have updated states of this job
        self._not_finite: dict[int, str] = {}  # of steps that have been begun: what first was not finite
        self._evaluations: dict[int, _Losses] = {}
        self._last_metrics: dict[str, Any] = {}
        self._ssd_bytes: dict[ActorName, _SsdBytes] = {}  # empty until the model is loaded
        if initial_step is not None:
            nothing = _SsdBytes(step=initial_step, read=0, written=0)
            self._ssd_bytes = dict.fromkeys(self.pipeline.shape.ssd_servers, nothing)

    # --- what others call -------------------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Takes an event; returns at once."""
        self._events.put(message)

    def cancel(self) -> None:
        """The job ends after the step that is being computed."""
        self._cancelled.set()

    def run(self) -> dict[str, Any]:
        """Works until the job is over, and returns its outcome, which is also the journal's last record."""
        with contextlib.closing(self._journal):
            try:
                self._loop()
            except JobFailedError as error:
                return self._end("failed", {"code": "training_failed", "message": str(error), "param": None})
            except ActorLostError as error:
                return self._end(INTERRUPTED, {"code": "process_lost", "message": str(error), "param": None})
            except (DeadlineMissedError, UnexpectedEventError) as error:
                return self._end("failed", {"code": "training_stalled", "message": str(error), "param": None})
            return self._end("cancelled" if self._cancelled.is_set() and not self._exported() else "succeeded", None)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        self._started_s = self._step_began_s = time.monotonic()
        if self.pipeline.committed < 0:
            if self._history.steps:
                raise JobFailedError(
                    f"the job had come to step {max(self._history.steps)}, and none of its SSDs "
                    f"({', '.join(self.spec.ssd_dirs)}) holds its states: they are not the ones that it began with, "
                    "or not mounted, or were emptied; put them back, or submit the job again"
                )
            self._journal.append("message", "Loading the model's weights into the tensor store")
        else:
            self._restore()
        self._carry_out(self.pipeline.start(time.monotonic()))
        next_tick_s = time.monotonic() + _TICK_S
        while not self.pipeline.finished:
            if self._cancelled.is_set():
                if self.pipeline.committed < 0:
                    return
                self._carry_out(self.pipeline.stop_after_current_step(time.monotonic()))
                if self.pipeline.finished:
                    return
            with contextlib.suppress(queue.Empty):
                self._take(self._events.get(timeout=_TICK_S))
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + _TICK_S
                self.pipeline.waits.check(time.monotonic())
                if self._check_actors is not None:
                    self._check_actors()

    def _end_step(self, step: int) -> str:
        """Takes stock of a step as soon as it is known what became of it. Returns what its commit keeps, as JSON."""
        state = {"trainer": self.pipeline.trainer.to_json(), "kernels": sorted(self._kernels)}
        kept: dict[str, Any] = {}
        if step > 0:
            data = self._metrics[step] = self._take_stock(step)
            kept = {name: data[name] for name in ("train_loss", "train_mean_token_accuracy", "grad_norm")}
        return json.dumps({**state, "trained_tokens": self._num_tokens, "metrics": kept})

    def _take_stock(self, step: int) -> dict[str, Any]:
        loss, end = self._losses.pop(step), self.pipeline.ends.pop(step)
        now_s = time.monotonic()
        step_s, self._step_began_s = now_s - self._step_began_s, now_s
        self._num_tokens += loss.num_targets
        return {
            "step": step,
            "total_steps": self.spec.total_steps,
            "train_loss": _finite(loss.loss_sum / loss.num_targets),
            "train_mean_token_accuracy": loss.num_correct / loss.num_targets,
            "learning_rate": self.pipeline.shape.learning_rate(step),
            "grad_norm": _finite(end.grad_norm),
            "loss_scale": end.loss_scale,
            "skipped_steps": end.num_skipped,
            "step_s": step_s,
            "tokens_per_s": loss.num_targets / step_s,
            "trained_tokens": self._num_tokens,
        }

    def _restore(self) -> None:
        """Takes up what the commit knows. The attempt before may have died before it could tell of that step."""
        assert self._resumed is not None
        step, state = self._told, self._resumed
        self._num_tokens = self._trained_tokens = state["trained_tokens"]
        self._kernels = set(state["kernels"])
        self._journal.append("message", f"Resuming after step {step}")
        if state["metrics"]:
            data: dict[str, Any] = {"step": step, "total_steps": self.spec.total_steps, **state["metrics"]}
            data["trained_tokens"] = self._trained_tokens
            self._last_metrics |= data
            if step not in self._history.steps:
                self._journal.append("metrics", self._step_message(data), **data)

    def _take(self, event: Message) -> None:
        match event:
            case ActorFailed():
                (Path(self.spec.job_dir) / "error.txt").write_text(f"{event.actor}\n{event.detail}")
                raise JobFailedError(f"{event.actor}: {event.error}")
            case LossComputed():
                self._on_loss(event)
            case Announcement():
                self._journal.append("message", event.text)
            case KernelChosen():
                self._on_kernel_chosen(event)
            case LoadProgressed():
                self.pipeline.waits.heard_from(self.pipeline.shape.optimizers[0], time.monotonic())
                share = event.num_params / event.total_params
                self._journal.append("message", f"Loaded {share:.0%} of {event.total_params:,} parameters")
            case _:
                instructions = self._handle(event)
                self._note(event)
                while self._told < self.pipeline.commits.settled:
                    self._told += 1
                    self._tell(self._told)
                self._carry_out(instructions)

    def _handle(self, event: Message) -> list[Instruction]:
        if isinstance(event, BlockComputed) and not event.is_finite and event.phase is Phase.FORWARD:
            self._not_finite.setdefault(event.step, f"the {event.phase} of block {event.block}")
        elif isinstance(event, BlockBackwardDone) and not math.isfinite(event.grad_sq_sum):
            self._not_finite.setdefault(event.step, f"the gradient of block {event.block}")
        try:
            return self.pipeline.handle(event, time.monotonic())
        except NotFiniteError as error:
            raise JobFailedError(
                f"{error}; {self._not_finite[event.step]} was the first: training has diverged, or the weights or the "
                "data are broken; try a lower learning rate, more warm-up or another precision"
            ) from error

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._send(instruction.to, instruction.message)

    # --- journal ----------------------------------------------------------------------------------------------------

    def _note(self, event: Message) -> None:
        """Tells of milestones."""
        match event:
            case ModelLoaded():
                seconds = time.monotonic() - self._started_s
                total = self.context.layout.numel
                self._journal.append("message", f"Loaded {total:,} parameters in {seconds:.1f} s; training begins")
                self._step_began_s = time.monotonic()
            case StoreCommitted():
                self._on_store_committed(event)
            case ModelExported():
                self._on_exported(event)
            case BlockComputed():
                self._compute_s[event.step] = self._compute_s.get(event.step, 0.0) + event.compute_s

    def _on_store_committed(self, event: StoreCommitted) -> None:
        before, a_step = self._ssd_bytes.get(event.actor), None
        if before is not None and event.step > before.step:
            a_step = (event.bytes_written - before.written) // (event.step - before.step)
        self._ssd_bytes[event.actor] = _SsdBytes(
            step=event.step, read=event.bytes_read, written=event.bytes_written, written_a_step=a_step
        )

    def _on_kernel_chosen(self, event: KernelChosen) -> None:
        self._journal.append("message", f"{event.actor} updates with the {event.kernel} kernel")
        if others := self._kernels - {event.kernel}:
            self._journal.append(
                "message",
                f"Other states of this job were updated with the {', '.join(others)} kernel: the results may differ in "
                "the last bit from those of one kernel",
                level="warn",
            )
        self._kernels.add(event.kernel)

    def _on_loss(self, event: LossComputed) -> None:
        if event.phase is Phase.HEAD:  # where it is not finite, neither are the gradients
            if not math.isfinite(event.loss_sum):
                self._not_finite.setdefault(event.step, f"the head of block {self.pipeline.shape.num_blocks - 1}")
            self._losses[event.step] = event
            return
        sums = self._evaluations.setdefault(event.step, _Losses())
        sums.loss_sum += event.loss_sum
        sums.num_targets += event.num_targets
        sums.num_correct += event.num_correct
        sums.num_groups += 1
        if sums.num_groups < self.pipeline.shape.num_evaluation_groups:
            return
        del self._evaluations[event.step]
        data: dict[str, Any] = {
            "step": event.step,
            "total_steps": self.spec.total_steps,
            "valid_loss": _finite(sums.loss_sum / sums.num_targets),
            "full_valid_loss": _finite(sums.loss_sum / sums.num_targets),
            "valid_mean_token_accuracy": sums.num_correct / sums.num_targets,
        }
        self._last_metrics |= data
        message = f"Step {event.step}: validation loss={_in_words(data['valid_loss'])}"
        self._journal.append("metrics", message, **data)

    def _tell(self, step: int) -> None:
        """A step is committed or, where none is due, over."""
        data = self._metrics.pop(step)
        self._trained_tokens = data["trained_tokens"]
        elapsed_s = time.monotonic() - self._started_s
        data["compute_s"] = self._compute_s.get(step, 0.0)
        self._compute_s = {each: seconds for each, seconds in self._compute_s.items() if each > step}
        data["elapsed_s"] = elapsed_s
        data["remaining_s"] = elapsed_s / (step - self._first_step + 1) * (self.spec.total_steps - step)
        data |= self._ssd_metrics()
        self._last_metrics |= data
        where = self._not_finite.pop(step, None)
        if data["grad_norm"] is None:
            text = f"Step {step} skipped: {where} was not finite"
            if self.pipeline.trainer.scales_loss:
                text += f"; the loss was scaled by {data['loss_scale']:g}"
            self._journal.append("message", text, level="warn")
        self._journal.append("metrics", self._step_message(data), **data)

    def _ssd_metrics(self) -> dict[str, Any]:
        """As of the last commit: what a step writes is the mean since the one before, and missing until it is known."""
        ssds = [self._ssd_bytes[name] for name in self.pipeline.shape.ssd_servers]
        data: dict[str, Any] = {
            "ssd_bytes_read": sum(each.read for each in ssds),
            "ssd_bytes_written": sum(each.written for each in ssds),
            "ssd_bytes_written_by_ssd": [
                before + each.written for before, each in zip(self._history.ssd_bytes_written, ssds, strict=True)
            ],
        }
        a_step = [each.written_a_step for each in ssds if each.written_a_step is not None]
        if len(a_step) == len(ssds):
            data |= {"ssd_bytes_written_step": sum(a_step), "ssd_bytes_written_step_by_ssd": a_step}
        return data

    def _step_message(self, data: dict[str, Any]) -> str:
        return f"Step {data['step']}/{self.spec.total_steps}: training loss={_in_words(data['train_loss'])}"

    def _exported(self) -> bool:
        return Path(self.spec.output_dir).is_dir()

    def _on_exported(self, event: ModelExported) -> None:
        names = (
            "train_loss",
            "train_mean_token_accuracy",
            "valid_loss",
            "full_valid_loss",
            "valid_mean_token_accuracy",
        )
        metrics = {name: self._last_metrics[name] for name in names if name in self._last_metrics}
        name = Path(event.path).name
        self._journal.append(
            "checkpoint",
            f"Checkpoint of step {event.step} written",
            step_number=event.step,
            fine_tuned_model_checkpoint=name,
            path=event.path,
            metrics={"step": event.step, **metrics},
        )

    def _end(self, status: str, error: dict[str, Any] | None) -> dict[str, Any]:
        message = {"succeeded": "The model is ready", "cancelled": "The job was cancelled"}.get(status)
        outcome: dict[str, Any] = {
            "status": status,
            "error": error,
            "trained_tokens": self._trained_tokens,
            "model_dir": self.spec.output_dir if status == "succeeded" else None,
        }
        self._journal.append_outcome(message=message or str(error and error["message"]), **outcome)
        return outcome


def _finite(number: float | None) -> float | None:
    """JSON has neither infinities nor NaN."""
    return number if number is not None and math.isfinite(number) else None


def _in_words(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"
