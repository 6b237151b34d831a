"""Simulates a job with the scheduler's real policy, and with actors that use a machine's simulated resources."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windlass.actors.job import CoreContext, box_of
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
from windlass.planner.simulation.clock import Clock, Process
from windlass.planner.simulation.gpu import SimulatedGpu
from windlass.planner.simulation.machine import SimulatedMachine
from windlass.planner.simulation.network import NetworkRates, SimulatedNetwork
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBox:
    """A box of a simulated job: its part of the job, its rates and its work."""

    context: CoreContext
    rates: Rates
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCommit:
    """A step that is durable on one SSD from a moment on."""

    ssd: ActorName
    step: Step
    at_s: float


class SimulatedJob:
    """A job with all its actors, on one box or several, in simulated time."""

    def __init__(
        self,
        context: CoreContext,
        shape: SchedulerConfig,
        rates: Rates,
        work: Work,
        *,
        keeps_spans: bool = True,
        others: Sequence[SimulatedBox] = (),
        network: NetworkRates | None = None,
    ) -> None:
        """`keeps_spans`: record spans and memory levels; else only the ends of steps are known.

        `others`: the other boxes of a job over several, which `network` connects. `context`, `rates` and `work` are
        then those of the first one.
        """
        boxes = (SimulatedBox(context=context, rates=rates, work=work), *others)
        clock, self.network = Clock(), None
        if network is not None:
            self.network = SimulatedNetwork(clock, network, self._use_cores)
        self._worlds = [
            SimulatedMachine(
                box.context,
                shape,
                box.rates,
                box.work,
                functools.partial(self._send_to_scheduler, index),
                functools.partial(self._send, index),
                keeps_spans=keeps_spans,
                clock=clock,
                network=self.network,
            )
            for index, box in enumerate(boxes)
        ]
        self._world = self._worlds[0]
        self._pipeline = Pipeline(shape, TrainerState(scales_loss=False), Step(0))
        self._optimizers: dict[ActorName, Optimizer] = {}
        self._workers: dict[ActorName, Worker] = {}
        for world in self._worlds:
            for name, states in zip(world.context.optimizers, world.context.plan.states, strict=True):
                self._optimizers[name] = Optimizer(world, name, states)
            params = ParamServer(world, self._tell_of_params)
            for rank, name in enumerate(world.context.gpu_workers):
                self._workers[name] = Worker(SimulatedGpu(world, rank), params.post)
        self.commits: list[SimulatedCommit] = []  # of all SSDs, the first one first
        self._most_s = math.inf  # of the step, if a longer one is of no use
        self._least_s = 0.0  # that the step takes, as far as it is known
        # Seconds from the beginning of a step to the end of each operation: in the step before, and in this one.
        self._ends_before_s: list[float] = []
        self._ends_s: list[float] = []
        self._issue(self._pipeline.start(0.0))

    def run(self, is_late: Callable[[], bool] = lambda: False) -> list[WorkSpan]:
        """Runs until the last step is committed, and returns all spans. Raises `Stuck`, or `TooLong` if `is_late`."""
        while self._world.clock.run(max_calls=_LOOK_EVERY):
            if is_late():
                raise TooLong
        if not self._pipeline.finished:
            raise self.stuck()
        return [span for world in self._worlds for span in world.spans]

    @property
    def clock(self) -> Clock:
        """The clock of all boxes."""
        return self._world.clock

    @property
    def num_boxes(self) -> int:
        """The number of boxes."""
        return len(self._worlds)

    @property
    def ssd_servers(self) -> tuple[ActorName, ...]:
        """The SSDs of all boxes."""
        return self._pipeline.config.ssd_servers

    @property
    def step_ends_s(self) -> Sequence[float]:
        """The times at which the backward passes of steps have ended."""
        return self._world.step_ends_s

    @property
    def round_ends_s(self) -> Sequence[float]:
        """The times at which the backward passes of rounds of groups have ended, of all steps."""
        return self._world.round_ends_s

    @property
    def committed(self) -> int:
        """The last step whose commit is decided."""
        return self._pipeline.committed

    @property
    def is_finished(self) -> bool:
        """True if all steps are committed."""
        return self._pipeline.finished

    @property
    def levels(self) -> list[Level]:
        """The memory levels from the start until now; empty without `keeps_spans`."""
        return [level for world in self._worlds for level in world.levels]

    def next_period_s(self, *, max_calls: int | None = None, most_s: float = math.inf) -> float:
        """Runs the next step. Returns the time from the end of the backward pass before it to that of its own.

        If the step takes longer than `most_s`, what is known of its time is returned as soon as that is known. Then the
        job cannot go on. Raises `Stuck`, or `TooLong` if more than `max_calls` events would be simulated.
        """
        ends_s = self._world.step_ends_s
        num_ended, since_s = len(ends_s), ends_s[-1] if ends_s else 0.0
        self._most_s, self._ends_before_s, self._ends_s = most_s, self._ends_s, []
        if most_s < math.inf:
            self._world.operation_ended = functools.partial(self._note_operation, since_s)
        is_left = self._world.clock.run(max_calls=max_calls)
        if self._least_s > self._most_s:
            return self._least_s
        if len(ends_s) == num_ended:
            raise TooLong if is_left else self.stuck()
        return ends_s[-1] - since_s

    def _note_operation(self, since_s: float) -> None:
        """Stops the job once its step takes longer than `most_s`: what is left takes as long as in the step before.

        The first step takes no longer than the next one, because no updates of a step before it are in its way.
        """
        passed_s, before_s = self._world.clock.now - since_s, self._ends_before_s
        self._least_s = passed_s + before_s[-1] - before_s[len(self._ends_s)] if before_s else passed_s
        self._ends_s.append(passed_s)
        if self._least_s > self._most_s:
            self._world.clock.pause()

    @property
    def pending(self) -> Pending:
        """A description of what goes on now."""
        nums_waiting = [len(self._pipeline.waits.outstanding)]
        for world in self._worlds:
            nums_waiting += world.nums_waiting
        if self.network is not None:
            nums_waiting += self.network.nums_waiting
        return Pending(nums_waiting=tuple(nums_waiting), calls_s=tuple(self._world.clock.pending_s))

    def _send_to_scheduler(self, box: int, event: Event) -> None:
        self._later(box, 0, lambda: self._issue(self._pipeline.handle(event, self._world.clock.now)))

    def _issue(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, DecideCommit):
                self._issue(self._pipeline.commit_decided(action.step, self._world.clock.now))
            elif not isinstance(action, EndStep):
                self._send(0, action.to, action.message)

    def _send(self, box: int, to: ActorName, message: Message) -> None:
        self._later(box, box_of(to), functools.partial(self._deliver, to, message))

    def _later(self, source: int, target: int, call: Callable[[], None]) -> None:
        """Calls a function on a box when a message of another actor has arrived there."""
        if source != target:
            assert self.network is not None, "the job has several boxes"
            call = functools.partial(self.network.send, source, target, call)
        self._world.clock.after(self._world.rates.message_s, call)

    def _use_cores(self, box: int, duration_s: float) -> None:
        """Occupies the cores that the link shares with compute, if they share any."""
        if self._worlds[box].rates.num_cores is not None:
            self._world.clock.soon(functools.partial(self._worlds[box].spend, duration_s))

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
                self._send_to_scheduler(box_of(to), StatesRestored(job=message.job, step=message.step, actor=to))
            case ExportModel():
                exported = ModelExported(job=message.job, step=message.step, actor=to, path=message.path)
                self._send_to_scheduler(box_of(to), exported)
            case UpdateStep() | GradOffloaded() if to in self._optimizers:
                self._optimizers[to].take(message)
            case _:
                self._workers[to].post(message)

    def _tell_of_params(self, to: ActorName, use: ParamUse, chunks: Sequence[ParamChunk]) -> None:
        self._workers[to].take_params(use, chunks)

    def stuck(self) -> Stuck:
        """Returns the error of a job that does not go on."""
        pipeline = self._pipeline
        waits = "; ".join(
            f"{wait.what} by {wait.actor}" for wait in itertools.islice(pipeline.waits.outstanding.values(), 5)
        )
        return Stuck(f"the simulated job ends at step {pipeline.committed} and waits for: {waits or 'nothing'}")

    def _commit(self, message: CommitStore, ssd: ActorName) -> Process:
        box = box_of(ssd)
        world, start_s = self._worlds[box], self._world.clock.now
        yield world.rates.commit_s
        world.note(ssd, SpanKind.COMMIT, message.step, NO_BLOCK, WHOLE_BLOCK, start_s)
        world.committed(ssd)
        self.commits.append(SimulatedCommit(ssd=ssd, step=message.step, at_s=world.clock.now))
        self._send_to_scheduler(
            box, StoreCommitted(job=message.job, step=message.step, actor=ssd, bytes_read=0, bytes_written=0)
        )
