"""The scheduler's core: events in, instructions out. No clock, no I/O, no Ray.

Two priority queues, gradient offload and optimizer update, ordered by (step, block), smallest first: earlier blocks
first, so that the next forward pass begins while later blocks are still being updated.
Source: AutoHete, section 3.3. The forward pass of block i in step t+1 waits for the update of block i in step t and for
nothing else; with clipping, updates wait for the norm of all gradients and then run in forward order.
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


@dataclass(slots=True)
class _StepUpdates:
    """How far the updates of one step are."""

    grad_sq_sum: float = 0.0
    num_backward_done: int = 0
    kept: dict[BlockIndex, tuple[GradChunk, ...]] = field(default_factory=dict)  # with clipping
    grad_scale: float = 1.0
    num_updated: int = 0


class Pipeline:
    """Order of one job's work. `handle` takes one event and returns what to send; `committed` is the last safe step."""

    def __init__(self, shape: JobShape, initial_step: Step | None = None) -> None:
        self.shape = shape
        self.committed: int = -1 if initial_step is None else initial_step
        self.versions = [self.committed] * shape.num_blocks  # last step whose update of the block is written
        self.waits: dict[tuple[str, int, int, str], Wait] = {}
        self.grad_norms: dict[int, float] = {}
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
        return self._commit(Step(0))

    def _on_block_computed(self, event: BlockComputed) -> list[Instruction]:
        self._settle("compute", event.op, event.block, self.shape.gpu_worker)
        del self._running[event.op]
        return []

    def _on_backward_done(self, event: BlockBackwardDone) -> list[Instruction]:
        self._settle("gradient", event.step, event.block, self.shape.gpu_worker)
        updates = self._steps.setdefault(event.step, _StepUpdates())
        updates.num_backward_done += 1
        updates.grad_sq_sum += event.grad_sq_sum
        heapq.heappush(self._to_offload, (event.step, event.block))
        if updates.num_backward_done == self.shape.num_blocks and self.shape.clip_norm is not None:
            norm = math.sqrt(updates.grad_sq_sum)
            self.grad_norms[event.step] = norm
            # As torch.nn.utils.clip_grad_norm_ has it; in this order a norm that is NaN gives NaN, and is not hidden.
            updates.grad_scale = min(self.shape.clip_norm / (norm + 1e-6), 1.0)
            for block, chunks in updates.kept.items():
                self._queue_update(event.step, block, chunks)
            updates.kept.clear()
        return []

    def _on_grad_offloaded(self, event: GradOffloaded) -> list[Instruction]:
        self._settle("offload", event.step, event.block, self.shape.gpu_worker)
        self._offloading.remove((event.step, event.block))
        updates = self._steps[event.step]
        if self.shape.clip_norm is not None and updates.num_backward_done < self.shape.num_blocks:
            updates.kept[event.block] = event.chunks
        else:
            self._queue_update(event.step, event.block, event.chunks)
        return []

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
        return self._commit(event.step)

    def _on_store_committed(self, event: StoreCommitted) -> list[Instruction]:
        self._settle("commit", event.step, 0, event.actor)
        waiting = self._committing[event.step]
        waiting.remove(event.actor)
        if not waiting:
            del self._committing[event.step]
            self.committed = event.step
        return []

    def _on_model_exported(self, event: ModelExported) -> list[Instruction]:
        self._settle("export", event.step, 0, self.shape.optimizers[0])
        self._exporting = False
        self._next = next(self._program, None)
        return []

    # --- decisions --------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Instruction]:
        return [*self._grant_offloads(), *self._grant_updates(), *self._grant_operations()]

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
            if any(self.versions[block] < operation.version for block in blocks):
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
        )
        return [*fetches, Instruction(worker, compute)]

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
            learning_rate=self.shape.learning_rate(step),
            grad_scale=self._steps[step].grad_scale,
        )

    def _commit(self, step: Step) -> list[Instruction]:
        self._committing[step] = set(self.shape.ssd_servers)
        state = self.shape.trainer_state(step)
        message = CommitStore(job=self.shape.job, step=step, attempt=self.shape.attempt, trainer_state=state)
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
