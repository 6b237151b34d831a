"""A scheduler whose actors answer at once, or not at all."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.peers.schedules import System, behaving_as
from tests.support.actors.specs import make_layout, make_spec
from tests.support.training import journal_of
from windlass.actors.job.context import GPU_WORKER, make_context, optimizer_name
from windlass.actors.job.spec import JobSpec
from windlass.actors.lifecycle.stop_request import StopRequest
from windlass.actors.messages import (
    ActorFailed,
    BlockComputed,
    BlockFlushed,
    BlockUpdated,
    CommitStore,
    ComputeBlock,
    ComputeBlocks,
    ComputeProgressed,
    DescribeStatus,
    ExportModel,
    FailureKind,
    FlushBlock,
    GradReady,
    LoadModel,
    LoadProgressed,
    Loss,
    Message,
    ModelExported,
    ModelLoaded,
    Phase,
    RestoreStates,
    StatesRestored,
    StatusDescribed,
    StoreCommitted,
    UpdateStep,
)
from windlass.actors.scheduler.scheduler import Scheduler
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import ActorName, BlockIndex, JobId, Precision, Rank, Step
from windlass.storage.store.format import CommitRecord

LAYOUT = make_layout(2048, 5000, 4096)
NUM_TARGETS = 10
AnyMessage = TypeVar("AnyMessage", bound=Message)
NBYTES_A_STEP = {"ssd-0": 50, "ssd-1": 30}

FP16 = {"precision": Precision.FP16}
TIERED: dict[str, Any] = {
    "total_steps": 7,
    "placement": Placement(host_blocks=(0,), device_blocks=(2,), commit_every=3),
}


class _StagedScheduler(Scheduler):
    """A scheduler whose GPU workers compute only when no event is left."""

    def __init__(self, stage: "Stage", *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stage = stage

    def _next_event(self, timeout_s: float) -> Message | None:
        if self._events.empty():
            self._stage.compute_next()
        return super()._next_event(timeout_s)


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Stage:
    """A scheduler whose actors answer each message inside the call that brings it."""

    def __init__(
        self,
        directory: Path,
        *,
        resume_from: CommitRecord | None = None,
        system: System | None = None,
        **changes: Any,
    ) -> None:
        options: dict[str, Any] = {"total_steps": 4, "deadline_s": 60.0, **changes}
        self.spec: JobSpec = make_spec(job_dir=str(directory), output_dir=str(directory / "out"), **options)
        if system is not None:
            self.spec = behaving_as(self.spec, system, len(LAYOUT.blocks))
        self.context = make_context(self.spec, LAYOUT, str(directory / "arena"))
        self.received: list[tuple[ActorName, Message]] = []
        self.silent: set[type[Message]] = set()  # message types that no actor answers
        self.statuses: dict[ActorName, str] = {}  # the answers of the actors that answer when asked
        self.loss = 3.0
        self.losses: dict[int, float] = {}  # by step, where the loss is another one
        self.bad_outputs: set[tuple[int, Phase, int]] = set()  # step, phase and block whose output is not finite
        self.bad_grads: set[tuple[int, int]] = set()  # step and block whose gradient is not finite
        self.loss_scale = 1.0  # of the current step
        self.bytes_written: Counter[str] = Counter()
        self.before: Callable[[Message], None] = lambda message: None
        self.check_actors: Callable[[], None] = lambda: None
        self.stop = StopRequest()
        self.grads: set[tuple[int, int]] = set()  # step and block of gradients whose update has not begun
        self.updating: dict[int, set[ActorName]] = {}  # by step: actors that may update it
        self.granted: dict[int, tuple[ActorName, ComputeBlock]] = {}  # by number
        self.scheduler = _StagedScheduler(
            self,
            self.context,
            self._send,
            resume_from=resume_from,
            check_actors=lambda: self.check_actors(),
            stop=self.stop,
        )

    def commit(self, step: int) -> CommitRecord:
        """The commit record that the stores keep of a committed step."""
        (state,) = {
            each.trainer_state for _, each in self.received if isinstance(each, CommitStore) and each.step == step
        }
        return CommitRecord(
            sequence=step,
            step=Step(step),
            attempt=self.spec.attempt,
            rank=Rank(0),
            manifest=0,
            manifest_digest=0,
            trainer_state=state,
        )

    def _send(self, to: ActorName, message: Message) -> None:
        if isinstance(message, ComputeBlocks):
            self.granted |= {operation.op: (to, operation) for operation in message.operations}
        else:
            self._take(to, message)

    def compute_next(self) -> None:
        """Computes the next granted operation, which counts as a message of its own here.

        Of several GPU workers' operations the smallest comes first, because others need its sum.
        """
        if self.granted:
            self._take(*self.granted.pop(min(self.granted)))

    def _take(self, to: ActorName, message: Message) -> None:
        self.received.append((to, message))
        self.before(message)
        if type(message) not in self.silent:
            for event in self._answers(to, message):
                self.scheduler.post(event)

    def _answers(self, to: ActorName, message: Message) -> list[Message]:
        facts: dict[str, Any] = {"job": message.job, "step": message.step}
        match message:
            case LoadModel():
                progress = LoadProgressed(
                    **facts, actor=optimizer_name(0), num_params=LAYOUT.numel // 2, total_params=LAYOUT.numel
                )
                return [progress, ModelLoaded(**facts, actor=to)]
            case ComputeBlock():
                progressed = replace(self._computed(message), actor=to)
                for grad in progressed.grads:
                    self.grads.add((grad.step, grad.block))
                return [progressed, *self._updates(message.step)]
            case UpdateStep():
                self.updating.setdefault(message.step, set()).add(to)
                return self._updates(message.step)
            case FlushBlock():
                return [BlockFlushed(**facts, block=message.block, actor=to)]
            case RestoreStates():
                return [StatesRestored(**facts, actor=to)]
            case CommitStore():
                self.bytes_written[to] += NBYTES_A_STEP[to]
                return [StoreCommitted(**facts, actor=to, bytes_read=100, bytes_written=self.bytes_written[to])]
            case ExportModel():
                Path(message.path).mkdir()
                return [ModelExported(**facts, actor=to, path=message.path)]
            case DescribeStatus() if to in self.statuses:
                return [StatusDescribed(**facts, actor=to, text=self.statuses[to])]
        return []

    def _updates(self, step: int) -> list[Message]:
        """The updates of blocks whose gradient is there, by the actors that may update the step."""
        if UpdateStep in self.silent:
            return []
        found: list[Message] = []
        for key in sorted(key for key in self.grads if key[0] == step):
            holders = self.scheduler.pipeline.config.holders(key[1])
            if self.updating.get(step, set()) >= set(holders):
                self.grads.remove(key)
                facts: dict[str, Any] = {"job": self.spec.job, "step": Step(step), "block": BlockIndex(key[1])}
                found += [BlockUpdated(**facts, actor=actor) for actor in holders]
        return found

    def _computed(self, message: ComputeBlock) -> ComputeProgressed:
        facts: dict[str, Any] = {"job": message.job, "step": message.step}
        loss, grads = None, []
        if message.phase is Phase.HEAD:
            self.loss_scale = message.loss_scale
        is_last = message.group == self.context.plan.num_groups - 1
        if message.phase in (Phase.HEAD, Phase.EVALUATE_HEAD):
            loss = Loss((self.losses.get(message.step, self.loss) * NUM_TARGETS,), NUM_TARGETS, 4)
        if is_last and message.phase in (Phase.HEAD, Phase.BACKWARD):
            is_bad = (message.step, message.block) in self.bad_grads
            sq_sum = math.inf if is_bad else 12.0 * self.loss_scale**2
            grads.append(GradReady(**facts, block=message.block, sq_sums=(sq_sum,)))
        computed = BlockComputed(
            **facts,
            op=message.op,
            phase=message.phase,
            block=message.block,
            group=message.group,
            compute_s=0.1,
            is_finite=(message.step, message.phase, message.block) not in self.bad_outputs,
            loss=loss,
        )
        if GradReady in self.silent:
            grads = []
        return ComputeProgressed(**facts, actor=GPU_WORKER, computed=(computed,), grads=tuple(grads))

    def break_step(self, step: int, block: int) -> None:
        """Makes the forward pass of a block overflow, and everything after it, as the GPU worker reports it."""
        head = len(LAYOUT.blocks) - 1
        self.bad_outputs |= {(step, Phase.FORWARD, each) for each in range(block, head)} | {(step, Phase.HEAD, head)}
        self.bad_grads |= {(step, each) for each in range(head + 1)}
        self.losses[step] = math.nan

    def sent(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        """The messages of one type that were sent, in order."""
        return [message for _, message in self.received if isinstance(message, kind)]

    def run(self) -> dict[str, Any]:
        outcome = self.scheduler.run()
        last = journal_of(self.spec)[-1]
        assert (last.kind, last.data) == ("outcome", outcome)
        assert last.level == ("error" if outcome["status"] == "failed" else "info")
        return outcome


def failure(actor: str, error: str, kind: FailureKind = FailureKind.LASTING) -> ActorFailed:
    return ActorFailed(
        job=JobId("ftjob-1"), step=Step(1), actor=ActorName(actor), kind=kind, error=error, detail="Traceback"
    )


def warnings_of(spec: JobSpec) -> list[str]:
    return [record.message for record in journal_of(spec) if record.level == "warn"]
