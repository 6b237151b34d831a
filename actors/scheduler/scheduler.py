"""The scheduler actor: passes events to the policy and sends its instructions.

It is a thin shell. `actors/policy/scheduler_core.py` decides the order of work, and `actors/scheduler/progress.py`
writes the reports for users. It imports no torch.
"""

import contextlib
import json
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from windlass.actors.job import (
    JOURNAL_FILE,
    CoreContext,
    JobContext,
    Journal,
    actor_in_words,
    append_error,
    num_evaluation_groups,
)
from windlass.actors.lifecycle import StopRequest
from windlass.actors.messages import (
    ActorFailed,
    CommitStore,
    DescribeStatus,
    Event,
    ExportProgressed,
    FailureKind,
    KernelChosen,
    LoadProgressed,
    MemoryReported,
    Message,
    ModelExported,
    ModelKernelsChosen,
    ModelLoaded,
    SpansReported,
    StatusDescribed,
    UserMessage,
)
from windlass.actors.policy import (
    Action,
    DeadlineMissedError,
    DecideCommit,
    EndStep,
    Instruction,
    NotFiniteError,
    Pipeline,
    SchedulerConfig,
    StageActors,
    TrainerState,
    UnexpectedEventError,
)
from windlass.actors.scheduler.checkpoint_policy import Checkpoints
from windlass.actors.scheduler.progress import Progress
from windlass.engine.checkpoint import remove_model_folder
from windlass.engine.memory_plan import PlanError
from windlass.engine.optimizer import learning_rate
from windlass.storage.ids import ActorName, ModelKernel, Precision, Step
from windlass.storage.store import DECISIONS_FILE, CommitRecord, Decision, DecisionLog

# Seconds between two checks for timeouts and lost actors.
_TICK_S = 1.0
# Ticks that the actors have to answer what their threads do, after a timeout.
_STATUS_TICKS = 4

# Texts about actors in the error of a stuck job.
_NO_ANSWER = "no answer, its process may hang"
_LOST_MESSAGE = "has no work: a message to it or its reply was lost"

# The outcome of an attempt that was lost through no fault of the job: another attempt can resume from the last commit.
INTERRUPTED = "interrupted"
# Key in such an outcome of the directory whose disk had too little space, and the bytes that must be free there.
ROOM = "room"
# The outcome of an attempt that ended on request, after a commit or before its first step: another attempt resumes.
PAUSED = "paused"
# The outcome of an attempt that ended on request with its job.
CANCELLED = "cancelled"
# The outcomes after which the job is not over and keeps its states.
GOES_ON = frozenset((INTERRUPTED, PAUSED))

_END_IN_WORDS = {
    "succeeded": "The model is ready",
    CANCELLED: "The job was cancelled",
    PAUSED: "The attempt ended after a commit, as requested",
}


class JobFailedError(Exception):
    """The attempt ended without a model; the text is for users."""


class ActorLostError(Exception):
    """A process of the job has died or cannot continue; the text is for users.

    `room` is the directory whose disk had too little space, with the bytes that must be free there.
    """

    def __init__(self, message: str, room: tuple[str, int] | None = None) -> None:
        super().__init__(message, room)
        self.room = room

    def __str__(self) -> str:
        return str(self.args[0])


def job_shape(context: CoreContext, output_dir: str, others: Sequence[CoreContext] = ()) -> SchedulerConfig:
    """Returns the policy's view of a job. `output_dir`: the folder of the final model. `others`: of the other boxes.

    Raises:
        PlanError: the plans of the boxes differ in what must be the same.
    """
    spec, layout, training, plan = context.spec, context.layout, context.spec.training, context.plan
    boxes = (context, *others)
    if len({bool(box.ssds) for box in boxes}) > 1:
        without = ", ".join(spec.name_of_box(box.spec.box) for box in boxes if not box.ssds)
        raise PlanError(f"{without} of the job have no SSDs, and others have some: give SSDs to all or to none")
    for other in others:
        same = [(each.group_size, each.num_groups, each.commit_every) for each in (plan, other.plan)]
        if same[0] != same[1]:
            raise PlanError(
                f"{spec.name_of_box(other.spec.box)} has groups of {same[1][0]} micro-batches and commits every "
                f"{same[1][2]} steps, and the first box has groups of {same[0][0]} and commits every "
                f"{same[0][2]}: give all boxes of the "
                "job the same group_size and commit_every"
            )

    def rate(step: int) -> float:
        return learning_rate(
            step,
            peak=training.learning_rate,
            warmup_steps=training.warmup_steps,
            total_steps=training.total_steps,
            schedule=training.schedule,
        )

    return SchedulerConfig(
        job=spec.job,
        attempt=spec.attempt,
        chunks=tuple(
            tuple(key for box in boxes for key in box.layout.chunk_keys(block.index)) for block in layout.blocks
        ),
        shared=tuple(max(shared, key=len) for shared in zip(*(box.layout.shared for box in boxes), strict=True)),
        total_steps=training.total_steps,
        num_evaluation_groups=num_evaluation_groups(spec),
        evaluate_every=training.evaluate_every or 0,
        evaluation_decides=spec.evaluation_decides,
        checkpoint_every=training.checkpoint_every or 0,
        clip_norm=training.clip_norm,
        keeps_grads=training.keeps_grads,
        max_bad_steps=training.max_bad_steps,
        learning_rate=rate,
        stages=tuple(
            StageActors(blocks=box.stage, gpu_workers=box.gpu_workers, optimizers=box.optimizers) for box in boxes
        ),
        ssd_servers=tuple(box.ssd_server(ssd) for box in boxes for ssd in range(len(box.ssds))),
        output_dir=output_dir,
        host_blocks=frozenset(block for box in boxes for block in box.plan.host_blocks),
        device_blocks=frozenset(block for box in boxes for block in box.plan.device_blocks),
        spilled_blocks=frozenset(block for box in boxes for block in box.plan.spilled_blocks),
        commit_every=plan.commit_every,
        num_groups=plan.num_groups,
        has_lanes=training.lanes > 1,
        ordering=spec.effective_ordering,
        deadline_s=spec.deadline_s,
    )


def _is_commit(action: Action) -> bool:
    return isinstance(action, Instruction) and isinstance(action.message, CommitStore)


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
        others: Sequence[JobContext] = (),
    ) -> None:
        """`resume_from` is the commit to resume from. `check_actors` raises ActorLostError if an actor has died.

        With `stop`, another thread can cancel or pause the attempt. `others`: the contexts of the job's other boxes.
        """
        self.context = context
        self._param_servers = [box.param_server for box in (context, *others)]
        self.spec = context.spec
        self._resumed: dict[str, Any] | None = None if resume_from is None else json.loads(resume_from.trainer_state)
        initial_step = None if resume_from is None else resume_from.step
        trainer = TrainerState(scales_loss=self.spec.training.precision is Precision.FP16)
        if self._resumed is not None:
            trainer.restore(self._resumed["trainer"])
        self.pipeline = Pipeline(job_shape(context, context.spec.output_dir, others), trainer, initial_step)
        names = self.spec.names_of_boxes
        self._boxes = names if len(names) > 1 else ()  # of a job over several
        self._send = send
        self._check_actors = check_actors
        self._events: queue.Queue[Message] = queue.Queue()
        self._model_kernels: dict[ActorName, tuple[ModelKernel, ...]] = {}  # of each GPU worker that has told of them
        self._stop = stop or StopRequest()
        self._journal = Journal(Path(self.spec.job_dir) / JOURNAL_FILE, self.spec.attempt)
        self._decisions = DecisionLog(Path(self.spec.job_dir) / DECISIONS_FILE)
        self._progress = Progress(
            self.pipeline.config,
            self._journal,
            num_params=sum(box.layout.numel for box in (context, *others)),
            initial_step=initial_step,
            scales_loss=trainer.scales_loss,
            on_evaluation=self._on_evaluation,
            expected_pace=self.spec.expected_pace,
            boxes=self._boxes,
        )
        self._checkpoints = Checkpoints(self.spec, (self._resumed or {}).get("checkpoints"))
        self._trainer_states: dict[int, str] = {}  # by step, for steps that are over: JSON that its commit stores
        self._remarks: list[str] = []  # messages about the job's model, repeated in the outcome

    # --- calls of the runner ----------------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Queues an event; returns at once. Thread-safe."""
        self._events.put(message)

    def run(self) -> dict[str, Any]:
        """Runs the attempt to its end and returns its outcome, which is also the journal's last record."""
        with contextlib.closing(self._journal), contextlib.closing(self._decisions):
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
        if self._resumed is not None:
            self._require_numerics(self._resumed.get("numerics", 1))
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
                # Replies that have arrived come first: they are no silence, however long this thread was busy.
                if self._events.empty():
                    self._check_deadlines()

    def _require_numerics(self, committed: int) -> None:
        """Checks that the job goes on with the bits of the rules that its last commit was made under."""
        if not self.spec.training.can_follow(committed):
            raise JobFailedError(
                f"step {self.pipeline.committed} was committed under version {committed} of the numerics, and the job "
                f"is to go on under version {self.spec.training.numerics}: its results would be neither one's; submit "
                "it again"
            )

    def _require_same_kernels(self, chosen: ModelKernelsChosen) -> None:
        """Checks that all GPU workers compute with the same kernels, so that results do not depend on who computes."""
        for actor, kernels in self._model_kernels.items():
            if kernels != chosen.kernels:
                here, there = (" and ".join(names) or "torch's own" for names in (chosen.kernels, kernels))
                raise JobFailedError(
                    f"{chosen.actor} computes with other kernels ({here}) than {actor} ({there}): the GPUs of a job "
                    "must be of one model; submit it with fewer (windlass.gpus), or with windlass.model_kernels torch"
                )
        self._model_kernels[chosen.actor] = chosen.kernels

    def _next_event(self, timeout_s: float) -> Message | None:
        """Waits for an event; returns None after the timeout."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    @property
    def _is_to_stop(self) -> bool:
        """True if the attempt is to stop now. A pause in the last step is ignored, because only the export is left."""
        return self._stop.is_cancelled or (
            self._stop.is_paused and self.pipeline.last_started_step < self.pipeline.final_step
        )

    def _status(self) -> str:
        if self._exported():
            return "succeeded"
        if self._stop.is_cancelled:
            return CANCELLED
        return PAUSED if self._stop.is_paused else "succeeded"

    def _check_deadlines(self) -> None:
        if not self.pipeline.waits.outstanding and not self.pipeline.finished:
            raise UnexpectedEventError("the job is not over, but no request is pending: a defect of the scheduler")
        try:
            self.pipeline.waits.check(time.monotonic())
        except DeadlineMissedError as error:
            statuses = self._statuses()
            # If the late ones answer, they wait for one that does not. No reply of that one may be late.
            mute = [actor for actor, text in statuses.items() if text == _NO_ANSWER]
            mute = [] if set(mute).intersection(error.late) else mute
            causes = [f"{actor} gives no answer, its process may hang" for actor in mute]
            no_work = {actor: _LOST_MESSAGE if actor in error.late else "" for actor in statuses}
            texts = {actor: text or no_work[actor] for actor, text in statuses.items()}
            told = [f"{actor}: {text}" for actor, text in texts.items() if text and actor not in mute]
            raise DeadlineMissedError("; ".join((*causes, str(error), *told)), (*mute, *error.late)) from None

    def _statuses(self) -> dict[ActorName, str]:
        """Asks all actors what their threads do, because a late one often waits for another. Returns the answers.

        The answer of an actor without work is empty. A failure that arrives meanwhile ends the attempt.
        """
        shape, answers = self.pipeline.config, dict[ActorName, str]()
        names = (*shape.gpu_workers, *self._param_servers, *shape.optimizers, *shape.ssd_servers)
        actors = dict.fromkeys(names)  # a single GPU worker reads params, too
        for actor in actors:
            self._send(actor, DescribeStatus(job=self.spec.job, step=Step(0)))
        until_s = time.monotonic() + _STATUS_TICKS * _TICK_S
        while len(answers) < len(actors) and (left_s := until_s - time.monotonic()) > 0:
            event = self._next_event(left_s)
            if isinstance(event, ActorFailed):
                self._fail(event)
            if isinstance(event, StatusDescribed):
                answers[event.actor] = event.text
        return {actor: answers.get(actor, _NO_ANSWER) for actor in actors}

    def _end_step(self, over: EndStep) -> None:
        """Records a step's end, and what its commit stores for a restart."""
        kept = self._progress.end_step(over.step, over.end)
        kept["checkpoints"] = self._checkpoints.to_json(time.monotonic())
        numerics = self.spec.training.numerics
        self._trainer_states[over.step] = json.dumps({"trainer": over.trainer, "numerics": numerics, **kept})

    def _on_evaluation(self, step: int, loss: float | None) -> None:
        """Applies the consequences of an evaluation, before the policy learns that it is over."""
        if not self.spec.evaluation_decides:
            return
        verdict = self._checkpoints.evaluated(step, loss)
        if verdict.is_best:
            self.pipeline.checkpoint_after(step)
        if verdict.ends_job and self.pipeline.finish_after_current_step():
            num, best = self._checkpoints.num_without_improvement, self._checkpoints.best
            text = (
                f"Ended early, after step {step} of {self.spec.training.total_steps}: no improvement in the last {num} "
            )
            text += "evaluation" if num == 1 else "evaluations"
            if best is not None:
                text += f"; the lowest validation loss was {best[1]:.4f}, at step {best[0]}"
            self._remark(text)
        if step == self.pipeline.final_step and (best_step := self._checkpoints.model_instead_of(step)) is not None:
            self._take_best(best_step)

    def _take_best(self, step: int) -> None:
        """Makes the checkpoint of an earlier step the job's model, if it still exists."""
        path = self.pipeline.config.path_of_checkpoint(step)
        if Path(path).is_dir():
            self.pipeline.export_copy_of(path)
            self._remark(f"The model is that of step {step}, which had the lowest validation loss")
        else:
            text = f"The best checkpoint, of step {step}, no longer exists: the model is that of the last step"
            self._remark(text, level="warn")

    def _remark(self, text: str, level: str = "info") -> None:
        self._journal.append("message", text, level=level)
        self._remarks.append(text)

    def _on_exported(self, event: ModelExported) -> None:
        self.pipeline.waits.require(ModelExported, event.step, event.actor)
        is_last = event.path == self.spec.output_dir
        if is_last and self.pipeline.copies_final_model:
            return  # it is a copy of a checkpoint that was already reported
        removed = self._checkpoints.exported(event.step, time.monotonic(), is_last=is_last)
        self._progress.report_export(event, self._checkpoints.reasons(event.step), self._checkpoints.kept)
        for step in removed:
            try:
                remove_model_folder(Path(self.pipeline.config.path_of_checkpoint(step)))
            except OSError as error:  # no reason to fail the job
                self._journal.append("message", f"A checkpoint could not be removed: {error}", level="warn")

    def _take(self, event: Message) -> None:
        match event:
            case ActorFailed():
                self._fail(event)
            case UserMessage():
                self._journal.append("message", self.spec.told_by_box(event.text, event.box))
            case ModelKernelsChosen():
                self._require_same_kernels(event)
                if event.kernels:
                    self._progress.note(event)
            case KernelChosen() | SpansReported() | MemoryReported():
                self._progress.note(event)
            case LoadProgressed() | ExportProgressed():
                self.pipeline.waits.heard_from(event.actor, time.monotonic())
                self._progress.note(event)
            case Event():
                self._progress.note(event)
                if isinstance(event, ModelExported):
                    # First, so that old checkpoints are removed before the next step begins. That may take long, and
                    # `_handle` starts the timeouts of the next instructions.
                    self._on_exported(event)
                actions = self._handle(event)
                if isinstance(event, ModelLoaded) and not self.pipeline.is_loading:
                    self._progress.model_loaded()
                    self._checkpoints.begin(time.monotonic())
                # The journal is written after all instructions but the commits, so that no work waits for it. Commits
                # come last: once the next one exists, a resumed attempt can no longer report the steps before it.
                self._carry_out([action for action in actions if not _is_commit(action)])
                self._progress.report_up_to(self.pipeline.commits.last_complete_step)
                self._carry_out([action for action in actions if _is_commit(action)])

    def _fail(self, event: ActorFailed) -> NoReturn:
        append_error(Path(self.spec.job_dir), self.spec.attempt, f"{event.actor}\n{event.detail}")
        text = f"{actor_in_words(event.actor, self._boxes)}: {event.error}"
        match event.kind:
            case FailureKind.LASTING:
                raise JobFailedError(text)
            case FailureKind.UNFORESEEN | FailureKind.NO_ROOM:
                raise ActorLostError(text, (event.room_path, event.room_nbytes) if event.room_path else None)
            case FailureKind.STALLED:
                raise DeadlineMissedError(text)

    def _handle(self, event: Event) -> list[Action]:
        """Passes an event to the policy. Returns its actions and, after a decided commit, those that it allows.

        Nothing but commits waits for the decision to be durable, which may take long on a busy disk.
        """
        try:
            actions = self.pipeline.handle(event, time.monotonic())
        except NotFiniteError as error:
            raise JobFailedError(
                f"{error}; {self._progress.first_not_finite(event.step)} was the first: training has diverged, or the "
                "weights or the data are broken; try a lower learning rate, more warm-up or another precision"
            ) from error
        if decided := [action for action in actions if isinstance(action, DecideCommit)]:
            self._carry_out([action for action in actions if action not in decided and not _is_commit(action)])
            actions = [action for action in actions if _is_commit(action)]
        for each in decided:
            self._decide(each.step)
            actions += self.pipeline.commit_decided(each.step, time.monotonic())
        return actions

    def _decide(self, step: Step) -> None:
        """Notes durably that all SSDs have committed a step. Only then may any SSD overwrite the step before."""
        decision = Decision.make(
            step=step,
            attempt=self.spec.attempt,
            epoch=self.spec.layout_epoch,
            trainer_state=self._trainer_states[step],
        )
        self._decisions.append(decision)

    def _carry_out(self, actions: list[Action]) -> None:
        """Sends instructions, and records what has ended after that, because it takes some milliseconds."""
        for action in sorted(actions, key=lambda action: isinstance(action, EndStep)):
            if isinstance(action, DecideCommit):
                raise AssertionError(f"step {action.step} must be decided before anything that follows from it")
            if isinstance(action, EndStep):
                self._end_step(action)
            elif isinstance(action.message, CommitStore):
                step = action.message.step
                self._send(action.to, replace(action.message, trainer_state=self._trainer_states[step]))
                self._trainer_states = {each: state for each, state in self._trainer_states.items() if each >= step}
            else:
                self._send(action.to, action.message)

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
