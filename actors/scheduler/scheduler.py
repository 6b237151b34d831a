"""The runner of a job: feeds the policy with events and carries its instructions out.

A thin shell: what runs when is decided in `actors/policy/pipeline.py`, and what people are told of it in
`actors/scheduler/progress.py`. It imports no torch.
"""

import contextlib
import json
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from windlass.actors.job import (
    GPU_WORKER,
    JOURNAL_FILE,
    SCHEDULER,
    JobContext,
    Journal,
    num_evaluation_groups,
    optimizer_name,
    ssd_name,
)
from windlass.actors.lifecycle import StopRequest
from windlass.actors.messages import (
    ActorFailed,
    CommitStore,
    FailureKind,
    KernelChosen,
    LoadProgressed,
    LossComputed,
    MemoryReported,
    Message,
    ModelExported,
    ModelKernelsChosen,
    ModelLoaded,
    SpansReported,
    UserMessage,
)
from windlass.actors.policy import (
    DeadlineMissedError,
    Instruction,
    NotFiniteError,
    Pipeline,
    SchedulerConfig,
    TrainerState,
    UnexpectedEventError,
)
from windlass.actors.scheduler.checkpoint_policy import Checkpoints
from windlass.actors.scheduler.progress import Progress
from windlass.engine.checkpoint import remove_model_folder
from windlass.engine.optimizer import learning_rate
from windlass.storage.ids import ActorName, Precision
from windlass.storage.store import CommitRecord

# How often deadlines and lost actors are looked for.
_TICK_S = 1.0
# Where somebody waits in vain, so do others; the one who knows most need not tell first.
_EXPLANATION_TICKS = 4

# The outcome of an attempt that was lost through no fault of the job's: another can go on from the last commit.
INTERRUPTED = "interrupted"
# What such an outcome calls the directory whose disk had too little room, and the bytes that must be free there.
ROOM = "room"
# ... and of one that ended after a commit because it was asked to: another goes on from there.
PAUSED = "paused"
# With these the job is not over: its states stay where they are.
GOES_ON = frozenset((INTERRUPTED, PAUSED))

_END_IN_WORDS = {
    "succeeded": "The model is ready",
    "cancelled": "The job was cancelled",
    PAUSED: "The attempt ended after a commit, as it was asked to",
}


class JobFailedError(Exception):
    """The attempt ended without a model; the text is for people."""


class ActorLostError(Exception):
    """A process of the job is gone, or of no use any more; the text is for people.

    `room`: the directory whose disk had too little room, and the bytes that must be free there.
    """

    def __init__(self, message: str, room: tuple[str, int] | None = None) -> None:
        super().__init__(message, room)
        self.room = room

    def __str__(self) -> str:
        return str(self.args[0])


def job_shape(context: JobContext, trainer_state: Callable[[int], str]) -> SchedulerConfig:
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

    return SchedulerConfig(
        job=spec.job,
        attempt=spec.attempt,
        chunks=tuple(tuple(layout.chunk_keys(block.index)) for block in layout.blocks),
        shared=layout.shared,
        total_steps=spec.total_steps,
        num_evaluation_groups=num_evaluation_groups(spec),
        evaluate_every=spec.evaluate_every or 0,
        evaluation_decides=spec.evaluation_decides,
        checkpoint_every=spec.checkpoint_every or 0,
        clip_norm=hyper.clip_norm,
        keeps_grads=hyper.keeps_grads,
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
        num_groups=plan.num_groups,
        ordering=spec.effective_ordering,
        deadline_s=spec.deadline_s,
    )


class Scheduler:
    """Runs one attempt from its first instruction to its outcome."""

    def __init__(
        self,
        context: JobContext,
        send: Callable[[ActorName, Message], None],
        *,
        resume_from: CommitRecord | None = None,
        check_actors: Callable[[], None] | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        """`resume_from`: the commit to go on from. `check_actors` raises ActorLostError when an actor is gone.

        `stop`: what others may ask of the attempt meanwhile.
        """
        self.context = context
        self.spec = context.spec
        self._resumed: dict[str, Any] | None = None if resume_from is None else json.loads(resume_from.trainer_state)
        initial_step = None if resume_from is None else resume_from.step
        trainer = TrainerState(scales_loss=self.spec.hyperparameters.precision is Precision.FP16)
        if self._resumed is not None:
            trainer.restore(self._resumed["trainer"])
        self.pipeline = Pipeline(job_shape(context, self._end_step), trainer, initial_step)
        self._send = send
        self._check_actors = check_actors
        self._events: queue.Queue[Message] = queue.Queue()
        self._stop = stop or StopRequest()
        self._journal = Journal(Path(self.spec.job_dir) / JOURNAL_FILE, self.spec.attempt)
        self._progress = Progress(
            self.pipeline.shape,
            self._journal,
            num_params=context.layout.numel,
            initial_step=initial_step,
            scales_loss=trainer.scales_loss,
            on_evaluation=self._on_evaluation,
            expected_pace=self.spec.expected_pace,
        )
        self._checkpoints = Checkpoints(self.spec, (self._resumed or {}).get("checkpoints"))
        self._remarks: list[str] = []  # on the job's model

    # --- what others call -------------------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Takes an event; returns at once."""
        self._events.put(message)

    def run(self) -> dict[str, Any]:
        """Works until the job is over, and returns its outcome, which is also the journal's last record."""
        with contextlib.closing(self._journal):
            try:
                self._loop()
            except JobFailedError as error:
                return self._end("failed", {"code": "training_failed", "message": str(error), "param": None})
            except ActorLostError as error:
                lost = {"code": "process_lost", "message": str(error), "param": None}
                return self._end(INTERRUPTED, lost, None if error.room is None else {ROOM: list(error.room)})
            except UnexpectedEventError as error:
                return self._end(INTERRUPTED, {"code": "process_lost", "message": str(error), "param": None})
            except DeadlineMissedError as error:
                return self._end(INTERRUPTED, {"code": "training_stalled", "message": str(error), "param": None})
            return self._end(self._status(), None)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        if self._resumed is None and (last_step := self._progress.last_step_in_journal):
            if not self.spec.ssd_dirs:
                raise JobFailedError(
                    f"the job had come to step {last_step}, and was lost: it has no SSDs, so nothing of it was kept; "
                    "submit it again"
                )
            raise JobFailedError(
                f"the job had come to step {last_step}, and none of its SSDs ({', '.join(self.spec.ssd_dirs)}) holds "
                "its states: they are not the ones that it began with, or not mounted, or were emptied; put them back, "
                "or submit the job again"
            )
        self._progress.begin(self._resumed)
        if self._resumed is not None:
            self._checkpoints.begin(time.monotonic())
            if self._checkpoints.resume_timed(self.pipeline.committed):
                self.pipeline.checkpoint_after(self.pipeline.committed)
        self._carry_out(self.pipeline.start(time.monotonic()))
        next_tick_s = time.monotonic() + _TICK_S
        while not self.pipeline.finished:
            if self._is_to_stop:
                if self.pipeline.committed < 0:
                    return
                self._carry_out(self.pipeline.stop_after_current_step(time.monotonic()))
                if self.pipeline.finished:
                    return
            if self.pipeline.committed >= 0 and self._checkpoints.is_time(time.monotonic()):
                self._checkpoints.time_has_come(step := self.pipeline.next_open_commit)
                self.pipeline.checkpoint_after(step)
            if (event := self._next_event(_TICK_S)) is not None:
                self._take(event)
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + _TICK_S
                if self._check_actors is not None:
                    self._check_actors()
                self._check_deadlines()

    def _next_event(self, timeout_s: float) -> Message | None:
        """Waits for an event; None where none came in time."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    @property
    def _is_to_stop(self) -> bool:
        """A job that is paused in its last step would only have its export left, for another attempt."""
        return self._stop.is_cancelled or (self._stop.is_paused and self.pipeline.begun < self.pipeline.final_step)

    def _status(self) -> str:
        if self._exported():
            return "succeeded"
        if self._stop.is_cancelled:
            return "cancelled"
        return PAUSED if self._stop.is_paused else "succeeded"

    def _check_deadlines(self) -> None:
        if not self.pipeline.waits.outstanding and not self.pipeline.finished:
            raise UnexpectedEventError("the job is not over, and nothing was asked for: a defect of the scheduler's")
        try:
            self.pipeline.waits.check(time.monotonic())
        except DeadlineMissedError as error:
            self._end_stalled({SCHEDULER: str(error)})

    def _end_stalled(self, told: dict[ActorName, str]) -> NoReturn:
        """Who waits for somebody who waits in vain as well may tell first: what others tell soon after counts too."""
        until_s = time.monotonic() + _EXPLANATION_TICKS * _TICK_S
        while (left_s := until_s - time.monotonic()) > 0:
            event = self._next_event(left_s)
            if isinstance(event, ActorFailed):
                if event.kind is not FailureKind.STALLED:
                    self._fail(event)
                told.setdefault(event.actor, f"{event.actor}: {event.error}")
        late = self.pipeline.waits.most_silent(time.monotonic())
        if late is not None and not {late.actor, SCHEDULER} & told.keys():
            told[SCHEDULER] = f"{late.actor} has not finished {late.what} yet"
        raise DeadlineMissedError("; ".join(told.values()))

    def _end_step(self, step: int) -> str:
        """What the commit of a step keeps for a restart: asked for as soon as it is known what became of the step."""
        kept = self._progress.end_step(step, self.pipeline.ends.pop(step, None))
        kept["checkpoints"] = self._checkpoints.to_json(time.monotonic())
        return json.dumps({"trainer": self.pipeline.trainer.to_json(), **kept})

    def _on_evaluation(self, step: int, loss: float | None) -> None:
        """Decides what an evaluation means, before the policy hears that it is over."""
        if not self.spec.evaluation_decides:
            return
        verdict = self._checkpoints.evaluated(step, loss)
        if verdict.is_best:
            self.pipeline.checkpoint_after(step)
        if verdict.ends_job and self.pipeline.finish_after_current_step():
            num, best = self._checkpoints.num_without_improvement, self._checkpoints.best
            text = f"Ended early, after step {step} of {self.spec.total_steps}: no improvement in the last {num} "
            text += "evaluation" if num == 1 else "evaluations"
            if best is not None:
                text += f"; the lowest validation loss was {best[1]:.4f}, at step {best[0]}"
            self._remark(text)
        if step == self.pipeline.final_step and (best_step := self._checkpoints.model_instead_of(step)) is not None:
            self._take_best(best_step)

    def _take_best(self, step: int) -> None:
        """The job's model will be that of an earlier step."""
        path = self.pipeline.shape.path_of_checkpoint(step)
        if Path(path).is_dir():
            self.pipeline.final_copy_of = path
            self._remark(f"The model is that of step {step}, which had the lowest validation loss")
        else:
            text = f"The checkpoint of step {step}, the best, is not there any more: the model is that of the last step"
            self._remark(text, level="warn")

    def _remark(self, text: str, level: str = "info") -> None:
        self._journal.append("message", text, level=level)
        self._remarks.append(text)

    def _on_exported(self, event: ModelExported) -> None:
        is_last = event.path == self.spec.output_dir
        if is_last and self.pipeline.final_copy_of is not None:
            return  # there is a checkpoint of that step
        removed = self._checkpoints.exported(event.step, time.monotonic(), is_last=is_last)
        self._progress.tell_export(event, self._checkpoints.reasons(event.step), self._checkpoints.kept)
        for step in removed:
            try:
                remove_model_folder(Path(self.pipeline.shape.path_of_checkpoint(step)))
            except OSError as error:  # no reason to lose the job
                self._journal.append("message", f"A checkpoint could not be removed: {error}", level="warn")

    def _take(self, event: Message) -> None:
        match event:
            case ActorFailed():
                self._fail(event)
            case UserMessage():
                self._journal.append("message", event.text)
            case LossComputed() | KernelChosen() | ModelKernelsChosen() | SpansReported() | MemoryReported():
                self._progress.note(event)
            case LoadProgressed():
                self.pipeline.waits.heard_from(event.actor, time.monotonic())
                self._progress.note(event)
            case _:
                self._progress.note(event)
                instructions = self._handle(event)
                if isinstance(event, ModelLoaded):
                    self._checkpoints.begin(time.monotonic())
                elif isinstance(event, ModelExported):
                    self._on_exported(event)  # what is to go is gone before the next step begins
                # Nobody waits for what people are told, but for the next commit: an attempt that goes on from there
                # could not tell of this one any more.
                commits = [each for each in instructions if isinstance(each.message, CommitStore)]
                self._carry_out([each for each in instructions if each not in commits])
                self._progress.tell_up_to(self.pipeline.commits.settled)
                self._carry_out(commits)

    def _fail(self, event: ActorFailed) -> NoReturn:
        with contextlib.suppress(OSError):  # the disk may be full, which is no reason to lose what is told here
            (Path(self.spec.job_dir) / "error.txt").write_text(f"{event.actor}\n{event.detail}")
        text = f"{event.actor}: {event.error}"
        match event.kind:
            case FailureKind.LASTING:
                raise JobFailedError(text)
            case FailureKind.UNFORESEEN | FailureKind.NO_ROOM:
                raise ActorLostError(text, (event.room_path, event.room_nbytes) if event.room_path else None)
            case FailureKind.STALLED:
                self._end_stalled({event.actor: text})

    def _handle(self, event: Message) -> list[Instruction]:
        try:
            return self.pipeline.handle(event, time.monotonic())
        except NotFiniteError as error:
            raise JobFailedError(
                f"{error}; {self._progress.first_not_finite(event.step)} was the first: training has diverged, or the "
                "weights or the data are broken; try a lower learning rate, more warm-up or another precision"
            ) from error

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._send(instruction.to, instruction.message)

    def _exported(self) -> bool:
        return Path(self.spec.output_dir).is_dir()

    def _end(self, status: str, error: dict[str, Any] | None, more: dict[str, Any] | None = None) -> dict[str, Any]:
        message = _END_IN_WORDS.get(status)
        outcome: dict[str, Any] = {
            "status": status,
            "error": error,
            "trained_tokens": self._progress.trained_tokens,
            "model_dir": self.spec.output_dir if status == "succeeded" else None,
        }
        outcome |= more or {}
        if status == "succeeded" and self._remarks:
            outcome |= {"total_steps": self.pipeline.final_step, "remarks": self._remarks}
        self._journal.append_outcome(message=message or str(error and error["message"]), **outcome)
        return outcome
