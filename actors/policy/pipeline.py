"""The scheduler's core: events in, instructions out. No clock, no I/O, no Ray.

Two priority queues, gradient offload and optimizer update, ordered by (step, block), smallest first: earlier blocks
first, so that the next forward pass begins while later blocks are still being updated.
Source: AutoHete, section 3.3. The forward pass of block i in step t+1 waits for the update of block i in step t and for
nothing else; with clipping or loss scaling, updates wait for all gradients and then run in forward order.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from windlass.actors.messages import (
    BlockBackwardDone,
    BlockComputed,
    BlockUpdated,
    CommitStore,
    ComputeBlock,
    ExportModel,
    GradChunk,
    GradOffloaded,
    GradSlotsReturned,
    LoadModel,
    Message,
    ModelExported,
    ModelLoaded,
    OffloadGrad,
    Phase,
    PrefetchParams,
    StoreCommitted,
    UpdateBlock,
)
from windlass.actors.policy.shape import JobShape, Operation, program
from windlass.actors.policy.trainer import StepResult, Trainer
from windlass.storage.ids import ActorName, BlockIndex, Step


@dataclass(frozen=True, slots=True)
class Instruction:
    """A message and who gets it."""

    to: ActorName
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something that was asked for and has not come yet."""

    since_s: float
    actor: ActorName
    what: str  # with step and block


class DeadlineMissedError(Exception):
    """Nothing came from an actor for longer than the job's deadline."""


class UnexpectedEventError(Exception):
    """An event that nothing asked for: a bug, or an actor of another attempt."""


class NotFiniteError(Exception):
    """Gradients are infinite or not a number, and cannot be skipped, or were too often. The text names the step."""


@dataclass(slots=True)
class _StepUpdates:
    """How far the updates of one step are."""

    loss_scale: float
    grad_sq_sum: float = 0.0
    num_backward_done: int = 0
    kept: dict[BlockIndex, tuple[GradChunk, ...]] = field(default_factory=dict)  # until all gradients are known
    result: StepResult | None = None  # None: not all gradients are known
    optimizer_step: int = 0
    grad_scale: float = 0.0
    num_updated: int = 0
    num_offloaded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """What is known of a step once all its gradients are."""

    grad_norm: float  # of all gradients, before clipping; NaN where one is not finite: the step is skipped
    loss_scale: float  # that the step had
    num_skipped: int  # steps so far, this one included


class Pipeline:
    """Order of one job's work. `handle` takes one event and returns what to send; `committed` is the last safe step."""

    def __init__(self, shape: JobShape, trainer: Trainer, initial_step: Step | None = None) -> None:
        """`trainer`: as the initial step left it."""
        self.shape = shape
        self.trainer = trainer
        self.committed: int = -1 if initial_step is None else initial_step
        self.versions = [self.committed] * shape.num_blocks  # last step whose update of the block is written
        self.waits: dict[tuple[str, int, int, str], Wait] = {}
        self.ends: dict[int, StepEnd] = {}  # of steps whose gradients are known; the caller takes them out
        self.last_step = shape.total_steps
        self._last_heard_s: dict[ActorName, float] = {}
        self._program = program(shape, max(self.committed, 0) + 1)
        self._next: Operation | None = next(self._program, None)
        self._running: dict[int, Operation] = {}
        self._steps: dict[int, _StepUpdates] = {}
        self._to_offload: list[tuple[int, int]] = []
        self._to_update: list[tuple[int, int]] = []
        self._grads: dict[tuple[int, int], tuple[GradChunk, ...]] = {}
        self._offloading: set[tuple[int, int]] = set()
        self._updating: dict[tuple[int, int], set[ActorName]] = {}
        self._committing: dict[int, set[ActorName]] = {}
        self._to_skip: int | None = None  # a step that waits to be committed as it is
        self._exporting = False
        self._stopped = False
        self._begun = max(self.committed, 0)  # last step of which anything has been granted
        self._handlers: dict[type[Message], Callable[..., list[Instruction]]] = {
            ModelLoaded: self._on_model_loaded,
            BlockComputed: self._on_block_computed,
            BlockBackwardDone: self._on_backward_done,
            GradOffloaded: self._on_grad_offloaded,
            BlockUpdated: self._on_block_updated,
            StoreCommitted: self._on_store_committed,
            ModelExported: self._on_model_exported,
        }

    # --- what the shell calls ---------------------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Instruction]:
        """The first instructions: load the model, or go on after the last committed step."""
        if self.committed < 0:
            message = LoadModel(job=self.shape.job, step=Step(0))
            return self._issue([Instruction(self.shape.optimizers[0], message)], now_s)
        return self._issue(self._advance(), now_s)

    def handle(self, event: Message, now_s: float) -> list[Instruction]:
        """Takes in one event. Raises UnexpectedEventError for one that nothing asked for."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise UnexpectedEventError(f"the scheduler does not know what to do with {event}")
        instructions = handler(event)
        self._last_heard_s[self._sender(event)] = now_s
        return self._issue([*instructions, *self._advance()], now_s)

    def heard_from(self, actor: ActorName, now_s: float) -> None:
        """Progress that is no event of its own, such as part of a long load."""
        self._last_heard_s[actor] = now_s

    def stop_after_current_step(self) -> None:
        """No operation of a step that has not begun is granted any more. Ends with a commit, without an export."""
        self._stopped = True
        self.last_step = min(self.last_step, self._begun)

    @property
    def finished(self) -> bool:
        """Nothing is left to do and everything is committed."""
        over = self._next is None or self._next.step > self.last_step or self._is_cut(self._next)
        return over and not self.waits and self.committed >= min(self.last_step, self.shape.total_steps)

    def check_deadlines(self, now_s: float) -> None:
        """Raises DeadlineMissedError when an actor that owes something has been silent for too long."""
        for wait in self.waits.values():
            silent_s = now_s - max(wait.since_s, self._last_heard_s.get(wait.actor, 0.0))
            if silent_s > self.shape.deadline_s:
                raise DeadlineMissedError(
                    f"{wait.actor} did not finish {wait.what} within {self.shape.deadline_s:g} s; "
                    f"see its log, and the health of the device it uses"
                )

    # --- events -----------------------------------------------------------------------------------------------------

    def _on_model_loaded(self, event: ModelLoaded) -> list[Instruction]:
        self._settle("load", 0, 0, self.shape.optimizers[0])
        self.versions = [0] * self.shape.num_blocks
        return self._commit(Step(0), is_unchanged=False)

    def _on_block_computed(self, event: BlockComputed) -> list[Instruction]:
        self._settle("compute", event.op, event.block, self.shape.gpu_worker)
        del self._running[event.op]
        return []

    def _on_backward_done(self, event: BlockBackwardDone) -> list[Instruction]:
        self._settle("gradient", event.step, event.block, self.shape.gpu_worker)
        updates = self._steps[event.step]
        updates.num_backward_done += 1
        updates.grad_sq_sum += event.grad_sq_sum
        heapq.heappush(self._to_offload, (event.step, event.block))
        if not self.shape.keeps_grads:
            self._check_active(event)
        if updates.num_backward_done < self.shape.num_blocks:
            return []
        return self._on_all_gradients(event.step, updates)

    def _check_active(self, event: BlockBackwardDone) -> None:
        if not math.isfinite(event.grad_sq_sum):
            raise NotFiniteError(
                f"a gradient of step {event.step} is not finite, and its updates have begun: the job ends at step "
                f"{event.step - 1}"
            )

    def _on_all_gradients(self, step: Step, updates: _StepUpdates) -> list[Instruction]:
        """Decides what becomes of a step. Where gradients are not kept, they are finite, and its updates have begun."""
        is_finite = math.isfinite(updates.grad_sq_sum)
        if self.shape.keeps_grads:
            self._end_step(updates, StepResult.UPDATED if is_finite else StepResult.SKIPPED)
        norm = math.sqrt(updates.grad_sq_sum) / updates.loss_scale if is_finite else math.nan
        num_skipped = step - self.trainer.num_updates
        self.ends[step] = StepEnd(grad_norm=norm, loss_scale=updates.loss_scale, num_skipped=num_skipped)
        kept, updates.kept = updates.kept, {}
        if updates.result is StepResult.SKIPPED:
            self._to_skip = step
            if self.trainer.num_bad_steps > self.shape.max_bad_steps:
                raise NotFiniteError(
                    f"the gradients of {self.trainer.num_bad_steps} steps in a row, up to step {step}, were not finite"
                )
            return [self._give_back(step, chunks) for chunks in kept.values()]
        if self.shape.clip_norm is not None:
            # As torch.nn.utils.clip_grad_norm_ has it.
            updates.grad_scale *= min(self.shape.clip_norm / (norm + 1e-6), 1.0)
        for block, chunks in kept.items():
            self._queue_update(step, block, chunks)
        return []

    def _end_step(self, updates: _StepUpdates, result: StepResult) -> None:
        updates.result = result
        updates.grad_scale = 1.0 / updates.loss_scale
        self.trainer.end_step(result)
        updates.optimizer_step = self.trainer.num_updates

    def _on_grad_offloaded(self, event: GradOffloaded) -> list[Instruction]:
        self._settle("offload", event.step, event.block, self.shape.gpu_worker)
        self._offloading.remove((event.step, event.block))
        updates = self._steps[event.step]
        updates.num_offloaded += 1
        if updates.result is StepResult.SKIPPED:
            return [self._give_back(event.step, event.chunks)]
        if updates.result is None:
            updates.kept[event.block] = event.chunks
        else:
            self._queue_update(event.step, event.block, event.chunks)
        return []

    def _give_back(self, step: Step, chunks: tuple[GradChunk, ...]) -> Instruction:
        spans = tuple(chunk.span for chunk in chunks)
        return Instruction(self.shape.gpu_worker, GradSlotsReturned(job=self.shape.job, step=step, spans=spans))

    def _on_block_updated(self, event: BlockUpdated) -> list[Instruction]:
        self._settle("update", event.step, event.block, event.actor)
        key = (event.step, event.block)
        self._updating[key].remove(event.actor)
        if self._updating[key]:
            return []
        del self._updating[key]
        self.versions[event.block] = event.step
        updates = self._steps[event.step]
        updates.num_updated += 1
        if updates.num_updated < self.shape.num_blocks:
            return []
        del self._steps[event.step]
        return self._commit(event.step, is_unchanged=False)

    def _on_store_committed(self, event: StoreCommitted) -> list[Instruction]:
        self._settle("commit", event.step, 0, event.actor)
        waiting = self._committing[event.step]
        waiting.remove(event.actor)
        if not waiting:
            del self._committing[event.step]
            self.committed = event.step
            if event.step == self._to_skip:
                self._to_skip = None
                self.versions = [event.step] * self.shape.num_blocks
        return []

    def _on_model_exported(self, event: ModelExported) -> list[Instruction]:
        self._settle("export", event.step, 0, self.shape.optimizers[0])
        self._exporting = False
        self._next = next(self._program, None)
        return []

    # --- decisions --------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Instruction]:
        return [*self._grant_offloads(), *self._grant_updates(), *self._grant_skip(), *self._grant_operations()]

    def _is_cut(self, operation: Operation) -> bool:
        """A job that was told to stop neither evaluates nor exports after its last step."""
        return self._stopped and operation.version == operation.step == self.last_step

    def _grant_operations(self) -> list[Instruction]:
        granted: list[Instruction] = []
        while (operation := self._next) is not None and operation.step <= self.last_step:
            if self.committed < 0 or self._is_cut(operation):
                break
            if operation.phase is None:
                granted.extend(self._grant_export(operation))
                break
            blocks = self.shape.shared[operation.block]
            if len(self._running) >= self.shape.max_prefetched:
                break
            waits_for = range(self.shape.num_blocks) if self.shape.updates_alone else blocks
            if any(self.versions[block] < operation.version for block in waits_for):
                break
            self._running[operation.op] = operation
            self._begun = operation.step
            self._next = next(self._program, None)
            granted.extend(self._compute(operation, blocks))
        return granted

    def _compute(self, operation: Operation, blocks: tuple[BlockIndex, ...]) -> list[Instruction]:
        worker, job = self.shape.gpu_worker, self.shape.job
        assert operation.phase is not None
        fetches = [
            Instruction(worker, PrefetchParams(job=job, step=operation.version, op=operation.op, block=block))
            for block in blocks
        ]
        compute = ComputeBlock(
            job=job,
            step=operation.step,
            op=operation.op,
            phase=operation.phase,
            block=operation.block,
            blocks=blocks,
            group=operation.group,
            loss_scale=self._loss_scale(operation),
        )
        return [*fetches, Instruction(worker, compute)]

    def _loss_scale(self, operation: Operation) -> float:
        """The gradients of a step begin at its head."""
        if operation.phase is not Phase.HEAD:
            return 1.0
        updates = self._steps[operation.step] = _StepUpdates(self.trainer.next_loss_scale)
        if not self.shape.keeps_grads:
            self._end_step(updates, StepResult.UPDATED)  # or with an error
        return updates.loss_scale

    def _grant_skip(self) -> list[Instruction]:
        """A skipped step is committed once nothing of it is on its way and the one before is safe."""
        step = self._to_skip
        if step is None or step not in self._steps or self.committed < step - 1:
            return []
        if self._steps[step].num_offloaded < self.shape.num_blocks:
            return []
        del self._steps[step]
        return self._commit(Step(step), is_unchanged=True)

    def _grant_export(self, operation: Operation) -> list[Instruction]:
        if self._exporting or self._running or self.committed < operation.version:
            return []
        self._exporting = True
        path = self.shape.path_of_export(operation.step)
        message = ExportModel(job=self.shape.job, step=operation.step, path=path)
        return [Instruction(self.shape.optimizers[0], message)]

    def _grant_offloads(self) -> list[Instruction]:
        granted = []
        while self._to_offload and len(self._offloading) < self.shape.max_offloading:
            step, block = heapq.heappop(self._to_offload)
            self._offloading.add((step, block))
            message = OffloadGrad(job=self.shape.job, step=Step(step), block=BlockIndex(block))
            granted.append(Instruction(self.shape.gpu_worker, message))
        return granted

    def _queue_update(self, step: int, block: BlockIndex, chunks: tuple[GradChunk, ...]) -> None:
        self._grads[(step, block)] = chunks
        heapq.heappush(self._to_update, (step, block))

    def _grant_updates(self) -> list[Instruction]:
        granted: list[Instruction] = []
        while self._to_update and len(self._updating) < self.shape.max_updating:
            step, block = self._to_update[0]
            # Step t overwrites what t-2 left; until t-1 is safe, that is what a restart would need.
            if self.committed < step - 1:
                break
            heapq.heappop(self._to_update)
            chunks = self._grads.pop((step, block))
            num = len(self.shape.optimizers)
            shares = {
                actor: tuple(chunk for chunk in chunks if chunk.key.chunk % num == i)
                for i, actor in enumerate(self.shape.optimizers)
            }
            self._updating[(step, block)] = {actor for actor, share in shares.items() if share}
            for actor, share in shares.items():
                if share:
                    granted.append(Instruction(actor, self._update(step, block, share)))
        return granted

    def _update(self, step: int, block: int, chunks: tuple[GradChunk, ...]) -> UpdateBlock:
        return UpdateBlock(
            job=self.shape.job,
            step=Step(step),
            block=BlockIndex(block),
            chunks=chunks,
            optimizer_step=self._steps[step].optimizer_step,
            learning_rate=self.shape.learning_rate(step),
            grad_scale=self._steps[step].grad_scale,
        )

    def _commit(self, step: Step, *, is_unchanged: bool) -> list[Instruction]:
        self._committing[step] = set(self.shape.ssd_servers)
        message = CommitStore(
            job=self.shape.job,
            step=step,
            attempt=self.shape.attempt,
            is_unchanged=is_unchanged,
            trainer_state=self.shape.trainer_state(step),
        )
        return [Instruction(ssd, message) for ssd in self.shape.ssd_servers]

    # --- deadlines --------------------------------------------------------------------------------------------------

    def _issue(self, instructions: list[Instruction], now_s: float) -> list[Instruction]:
        for instruction in instructions:
            for key, what in _waits_of(instruction.message):
                wait = Wait(since_s=now_s, actor=instruction.to, what=what)
                self.waits[(*key, instruction.to)] = wait
        return instructions

    def _settle(self, kind: str, number: int, block: int, actor: ActorName) -> None:
        if self.waits.pop((kind, number, block, actor), None) is None:
            raise UnexpectedEventError(f"{actor} reported a {kind} of {number}, block {block}, that nobody asked for")

    def _sender(self, event: Message) -> ActorName:
        if isinstance(event, (BlockUpdated, StoreCommitted)):
            return event.actor
        if isinstance(event, (ModelLoaded, ModelExported)):
            return self.shape.optimizers[0]
        return self.shape.gpu_worker


def _waits_of(message: Message) -> list[tuple[tuple[str, int, int], str]]:
    """What an instruction makes the scheduler wait for, and its names for people."""
    match message:
        case LoadModel():
            return [(("load", 0, 0), "loading the model")]
        case ComputeBlock():
            where = f"of block {message.block} in step {message.step}"
            computed = (("compute", message.op, message.block), f"the {message.phase} {where}")
            if message.phase not in (Phase.HEAD, Phase.BACKWARD):
                return [computed]
            return [computed, (("gradient", message.step, message.block), f"the gradient {where}")]
        case OffloadGrad():
            what = f"the gradient offload of block {message.block} in step {message.step}"
            return [(("offload", message.step, message.block), what)]
        case UpdateBlock():
            what = f"the update of block {message.block} in step {message.step}"
            return [(("update", message.step, message.block), what)]
        case CommitStore():
            return [(("commit", message.step, 0), f"the commit of step {message.step}")]
        case ExportModel():
            return [(("export", message.step, 0), f"the export of step {message.step}")]
        case _:
            return []
