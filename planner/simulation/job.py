"""Simulates a job with the scheduler's real policy, and with actors that use a machine's simulated resources."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windlass.actors.job import CoreContext
from windlass.actors.messages import (
    CommitDecided,
    CommitStore,
    Event,
    ExportModel,
    FlushBlock,
    GradOffloaded,
    Message,
    ModelExported,
    ParamChunk,
    ParamUse,
    RestoreStates,
    SpanKind,
    StatesRestored,
    StoreCommitted,
    UpdateStep,
    WorkSpan,
)
from windlass.actors.policy import Action, DecideCommit, EndStep, Pipeline, SchedulerConfig, TrainerState
from windlass.actors.timeline import NO_BLOCK, WHOLE_BLOCK, Level
from windlass.planner.simulation.clock import Process
from windlass.planner.simulation.gpu import SimulatedGpu
from windlass.planner.simulation.machine import SimulatedMachine
from windlass.planner.simulation.resources import Rates, Stuck, TooLong, Work
from windlass.planner.simulation.workers import Optimizer, ParamServer, Worker
from windlass.storage.ids import ActorName, Step

# Number of simulation events between two checks of the time limit.
_LOOK_EVERY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Requests and calls that a job waits for at a moment."""

    nums_waiting: tuple[int, ...]  # requests of each kind that wait
    calls_s: tuple[float, ...]  # seconds until each call to come, in order


class SimulatedJob:
    """A job with all its actors, in simulated time."""

    def __init__(
        self, context: CoreContext, shape: SchedulerConfig, rates: Rates, work: Work, *, keeps_spans: bool = True
    ) -> None:
        """`keeps_spans`: record spans and memory levels; else only the ends of steps are known."""
        self._world = SimulatedMachine(
            context, shape, rates, work, self._send_to_scheduler, self._send, keeps_spans=keeps_spans
        )
        self._pipeline = Pipeline(shape, TrainerState(scales_loss=False), Step(0))
        self._optimizers = {
            name: Optimizer(self._world, name, context.plan.states[index])
            for index, name in enumerate(shape.optimizers)
        }
        params = ParamServer(self._world, self._tell_of_params)
        self._workers = {
            name: Worker(SimulatedGpu(self._world, rank), params.post) for rank, name in enumerate(shape.gpu_workers)
        }
        self._issue(self._pipeline.start(0.0))

    def run(self, is_late: Callable[[], bool] = lambda: False) -> list[WorkSpan]:
        """Runs until the last step is committed, and returns all spans. Raises `Stuck`, or `TooLong` if `is_late`."""
        while self._world.clock.run(max_calls=_LOOK_EVERY):
            if is_late():
                raise TooLong
        if not self._pipeline.finished:
            raise self._stuck()
        return self._world.spans

    @property
    def levels(self) -> list[Level]:
        """The memory levels from the start until now; empty without `keeps_spans`."""
        return self._world.levels

    def next_period_s(self) -> float:
        """Runs the next step. Returns the time from the end of the backward pass before it to that of its own.

        Raises `Stuck`.
        """
        ends_s = self._world.step_ends_s
        num_ended, since_s = len(ends_s), ends_s[-1] if ends_s else 0.0
        self._world.clock.run()
        if len(ends_s) == num_ended:
            raise self._stuck()
        return ends_s[-1] - since_s

    @property
    def pending(self) -> Pending:
        """A description of what goes on now."""
        nums_waiting = (len(self._pipeline.waits.outstanding), *self._world.nums_waiting)
        return Pending(nums_waiting=nums_waiting, calls_s=tuple(self._world.clock.pending_s))

    def _send_to_scheduler(self, event: Event) -> None:
        self._later(lambda: self._issue(self._pipeline.handle(event, self._world.clock.now)))

    def _issue(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, DecideCommit):
                self._issue(self._pipeline.commit_decided(action.step, self._world.clock.now))
            elif not isinstance(action, EndStep):
                self._send(action.to, action.message)

    def _send(self, to: ActorName, message: Message) -> None:
        self._later(functools.partial(self._deliver, to, message))

    def _later(self, call: Callable[[], None]) -> None:
        self._world.clock.after(self._world.rates.message_s, call)

    def _deliver(self, to: ActorName, message: Message) -> None:
        clock = self._world.clock
        match message:
            case CommitStore():
                clock.process(self._commit(message, to))
            case CommitDecided():
                pass  # no simulated write comes before it
            case FlushBlock() if to in self._optimizers:
                clock.process(self._optimizers[to].flush(message))
            case RestoreStates():
                self._send_to_scheduler(StatesRestored(job=message.job, step=message.step, actor=to))
            case ExportModel():
                self._send_to_scheduler(ModelExported(job=message.job, step=message.step, actor=to, path=message.path))
            case UpdateStep() | GradOffloaded() if to in self._optimizers:
                self._optimizers[to].take(message)
            case _:
                self._workers[to].post(message)

    def _tell_of_params(self, to: ActorName, use: ParamUse, chunks: Sequence[ParamChunk]) -> None:
        self._workers[to].take_params(use, chunks)

    def _stuck(self) -> Stuck:
        pipeline = self._pipeline
        waits = ", ".join(f"{wait}" for wait in itertools.islice(pipeline.waits.outstanding.values(), 5))
        return Stuck(f"the simulated job ends at step {pipeline.committed} and waits for: {waits or 'nothing'}")

    def _commit(self, message: CommitStore, ssd: ActorName) -> Process:
        start_s = self._world.clock.now
        yield self._world.rates.commit_s
        self._world.note(ssd, SpanKind.COMMIT, message.step, NO_BLOCK, WHOLE_BLOCK, start_s)
        self._world.committed(ssd)
        self._send_to_scheduler(
            StoreCommitted(job=message.job, step=message.step, actor=ssd, bytes_read=0, bytes_written=0)
        )
