"""Runs an attempt of a job on Ray: its start, its scheduler, and its end.

The runner is a detached, named actor. It creates all other actors (`ray_box.py`), which die with it.
"""

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from windlass.actors.job import JOURNAL_FILE, SCHEDULER, JobContext, JobSpec, Journal, append_error
from windlass.actors.lifecycle import StartReport, StopRequest, begin_attempt, has_begun, tell_alive
from windlass.actors.messages import Message, UserMessage
from windlass.actors.runtime.ray_box import RayBox, hide_gpus
from windlass.actors.runtime.sockets import MessageServer
from windlass.actors.runtime.start_up import START_DEADLINE_S, start_actors
from windlass.actors.scheduler import CANCELLED, GOES_ON, INTERRUPTED, PAUSED, ActorLostError, Scheduler
from windlass.engine.memory_plan import PlanError
from windlass.engine.model import ModelLayout
from windlass.storage.ids import ActorName, Attempt, JobId
from windlass.storage.integrity import StoreError
from windlass.storage.memory import InsufficientSpaceError, is_out_of_space, may_find_room_later
from windlass.storage.store import CommitRecord

NAMESPACE = "windlass"
# Seconds that a runner waits for disk space to write its outcome, and seconds between two tries. The first is less than
# the minute after which a runner without a sign of life counts as hung, because the runner gives none meanwhile.
_ROOM_DEADLINE_S, _ROOM_TRY_S = 45.0, 1.0
# Seconds between the runner's signs of life.
_PULSE_S = 1.0

_Send = Callable[[ActorName, Message], None]


class _StoppedAtStartError(Exception):
    """The attempt was cancelled or paused before its actors had started.

    The service removes the states of a cancelled job.
    """


def runner_name(job: JobId, attempt: Attempt) -> str:
    """The Ray name of a job's runner."""
    return f"job-{job}-{attempt}"


class RunnerActor:
    """A detached actor that runs an attempt, or a box's part of it, in a thread. At the end it ends its own process."""

    def __init__(self, spec: JobSpec) -> None:
        hide_gpus()
        self.spec = spec
        self._waits_for_room = False  # waiting for disk space to write the outcome

    def start(self) -> None:
        """Starts the attempt's threads and returns at once, so that the attempt does not depend on its caller."""
        self._attempt_lock = begin_attempt(Path(self.spec.job_dir), self.spec.attempt)
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()
        threading.Thread(target=self._run, name="runner", daemon=True).start()

    def _pulse(self) -> None:
        """Gives signs of life until the attempt is closed, because Ray does not notice a hung process."""
        while self._waits_for_room or tell_alive(Path(self.spec.job_dir), self.spec.attempt):
            time.sleep(_PULSE_S)

    def _run(self) -> None:
        try:
            self._attempt()
        except Exception as error:  # noqa: BLE001 - no caller waits for this thread
            self._fail(error)
        finally:
            ray.kill(ray.get_runtime_context().current_actor)

    def _attempt(self) -> None:
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        """Tells of the error that ended the attempt. It is being handled."""
        raise NotImplementedError

    def _read_layout(self) -> ModelLayout:
        return ModelLayout.from_json(Path(self.spec.layout_file).read_text())

    def _note_error(self, text: str) -> None:
        """Appends an error to the job's file of errors."""
        append_error(Path(self.spec.job_dir), self.spec.attempt, text)


class Runner(RunnerActor):
    """The runner of a job on one box.

    It starts the other actors, runs the scheduler in a thread, and at the end stops the others and itself.
    """

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._scheduler: Scheduler | None = None
        self._stop = StopRequest()
        self._lock = threading.Lock()  # protects `_scheduler`, `_early`, `_is_over` and the runner's journal writes
        self._early: list[Message] = []  # messages that arrived before the scheduler was made
        self._waits = StartReport(self._tell_wait)
        self._told: set[str] = set()  # messages of actors, before the scheduler was made
        self._is_over = False  # the outcome is in the journal

    def _post(self, messages: Sequence[Message]) -> None:
        with self._lock:
            for message in messages:
                if self._scheduler is not None:
                    self._scheduler.post(message)
                elif isinstance(message, UserMessage):
                    text = self.spec.told_by_box(message.text, message.box)
                    if text not in self._told:  # all actors of a box may say the same
                        self._told.add(text)
                        self._tell_message(text)
                else:
                    self._early.append(message)

    def _make_scheduler(
        self,
        context: JobContext,
        send: _Send,
        commit: CommitRecord | None,
        check_actors: Callable[[], None],
        others: Sequence[JobContext] = (),
    ) -> Scheduler:
        """Makes the scheduler and passes it the messages so far. Later ones go to it directly."""
        with self._lock:
            scheduler = Scheduler(
                context, send, resume_from=commit, check_actors=check_actors, stop=self._stop, others=others
            )
            for message in self._early:
                scheduler.post(message)
            self._scheduler = scheduler
        return scheduler

    def _open_journal(self) -> Journal:
        """Opens the journal. The caller holds the lock, and no scheduler may have the journal open.

        Two writers would give the same sequence numbers.
        """
        return Journal(Path(self.spec.job_dir) / JOURNAL_FILE, self.spec.attempt)

    def _tell_message(self, text: str) -> None:
        """Appends a message to the journal. The caller holds the lock, and the scheduler is not made yet."""
        if self._is_over:
            return
        with contextlib.suppress(OSError), contextlib.closing(self._open_journal()) as journal:  # the disk may be full
            journal.append("message", text)

    def cancel(self) -> None:
        """Ends the job after its current step."""
        self._stop.cancel()

    def pause(self) -> None:
        """Ends the attempt after its current step; the job's states stay for another attempt."""
        self._stop.pause()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, _StoppedAtStartError):
            if self._stop.is_cancelled:
                self._tell_end(CANCELLED, "The job was cancelled while its attempt started")
            else:
                self._tell_end(PAUSED, "The attempt ended while it started, as requested")
            return
        detail = traceback.format_exc()
        self._note_error(detail)
        if self._is_over:
            return  # the journal has the outcome, and this error is one of the actors' stop
        was_lost = isinstance(error, ActorLostError | TimeoutError | ray.exceptions.RayActorError)
        was_lost |= may_find_room_later(error, self.spec.attempt)
        is_for_users = isinstance(
            error, ActorLostError | TimeoutError | InsufficientSpaceError | StoreError | ValueError
        )
        message = str(error) if is_for_users else f"{type(error).__name__}: {error}"
        code, param = getattr(error, "code", "start_failed"), getattr(error, "param", None)
        told = {"code": code, "message": message, "param": param}
        self._tell_end(INTERRUPTED if was_lost else "failed", message, told)

    def _tell_end(self, status: str, message: str, error: dict[str, Any] | None = None) -> None:
        """Writes the attempt's last record. If the disk stays full too long, the attempt ends without one.

        The runner gives no signs of life meanwhile. If there is no record, the service learns of the end from that.
        """
        until_s = time.monotonic() + _ROOM_DEADLINE_S
        while True:
            try:
                with self._lock, contextlib.closing(self._open_journal()) as journal:
                    self._is_over = True
                    journal.append_outcome(status, message, error, model_dir=None)
                return
            except OSError as problem:
                if not is_out_of_space(problem) or time.monotonic() > until_s:
                    raise
            self._waits_for_room = True
            time.sleep(_ROOM_TRY_S)

    def _attempt(self) -> None:
        spec = self.spec
        if spec.stages:
            raise PlanError(f"the job has {len(spec.stages)} stages, and its runner knows no other boxes")
        mailbox = MessageServer(self._post)
        box = RayBox.start(spec, self._read_layout(), {SCHEDULER: mailbox.address}, self._during_wait)
        with contextlib.closing(box):
            commit = start_actors([spec], box.call)
            outcome = self._train(box.context, box.send, commit, box.check)
            if outcome["status"] != INTERRUPTED:  # after an interruption, workers may be dead or hang: only kill them
                box.stop_actors(is_over=outcome["status"] not in GOES_ON)

    def _train(
        self,
        context: JobContext,
        send: _Send,
        commit: CommitRecord | None,
        check_actors: Callable[[], None],
        others: Sequence[JobContext] = (),
    ) -> dict[str, Any]:
        """Runs the scheduler, and returns the outcome, which is in the journal."""
        outcome = self._make_scheduler(context, send, commit, check_actors, others).run()
        with self._lock:
            self._is_over = True
        return outcome

    def _during_wait(self, what: str) -> None:
        """Says what the attempt waits for while it starts. Raises the error of `_check_stop`; see `DuringWait`."""
        self._check_stop()
        self._waits.note(what)

    def _tell_wait(self, text: str) -> None:
        with self._lock:
            self._tell_message(text)

    def _check_stop(self) -> None:
        """Raises _StoppedAtStartError if the attempt is to stop, unless only its report of a complete model is left."""
        if self._stop.is_made and not Path(self.spec.output_dir).is_dir():
            raise _StoppedAtStartError


def start_runner(spec: JobSpec) -> None:
    """Launches an attempt on one box, the caller's node; see `launch_runner`."""
    launch_runner(Runner, spec, spec)


def launch_runner(kind: type[RunnerActor], spec: JobSpec, *arguments: object) -> None:
    """Launches the runner of an attempt on the caller's node; Ray must be connected. Returns when it has begun.

    The runner may already be over then: one that refuses its job ends within milliseconds. Its journal has the reason.
    """
    # The runner requests no resources, so without this Ray could place it on any node, even a cluster's head.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    runner = (
        ray.remote(kind)
        .options(
            name=runner_name(spec.job, spec.attempt),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=here,
        )
        .remote(*arguments)
    )
    _await_beginning(runner.start.remote(), spec)


def _await_beginning(started: Any, spec: JobSpec) -> None:
    try:
        ray.get(started, timeout=START_DEADLINE_S)
    except ray.exceptions.RayActorError:
        # A runner that ends at once may die before its answer to `start` is sent.
        if not has_begun(Path(spec.job_dir), spec.attempt):
            raise


def find_runner(job: JobId, attempt: Attempt) -> Any | None:
    """Returns the runner of an attempt, or None if there is none."""
    try:
        return ray.get_actor(runner_name(job, attempt), namespace=NAMESPACE)
    except ValueError:
        return None


def cancel_runner(job: JobId, attempt: Attempt) -> None:
    """Asks a runner to end its job after the current step; does nothing if the runner is gone."""
    runner = find_runner(job, attempt)
    if runner is not None:
        runner.cancel.remote()


def pause_runner(job: JobId, attempt: Attempt) -> None:
    """Asks a runner to end its attempt after the current step and to keep the job's states.

    Does nothing if the runner is gone.
    """
    runner = find_runner(job, attempt)
    if runner is not None:
        runner.pause.remote()
