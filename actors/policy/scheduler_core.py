"""The scheduler's core: events in, instructions out. No clock, no I/O, no Ray.

It has two priority queues, for gradient offloads and for optimizer updates. Both are ordered by (step, block), smallest
first, so that the next forward pass begins while later blocks are still being updated.
Source: AutoHete, section 3.3.

The forward pass of block i in step t+1 waits only for the update of block i in step t. With clipping or loss scaling,
updates wait for all gradients and then run in forward order.
For comparisons, queues can be in order of arrival, and steps can run without overlap (`block_queue.py`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from windlass.actors.messages import (
    BlockBackwardDone,
    BlockComputed,
    BlockFlushed,
    BlockUpdated,
    ComputeBlock,
    ExportModel,
    GradChunk,
    GradDiscarded,
    GradOffloaded,
    LoadModel,
    Message,
    ModelExported,
    ModelLoaded,
    OffloadGrad,
    Phase,
    PrefetchParams,
    RestoreStates,
    StatesRestored,
    StoreCommitted,
    UpdateBlock,
)
from windlass.actors.policy.block_queue import BlockQueue
from windlass.actors.policy.clipping import clip_scale
from windlass.actors.policy.commits import Commits
from windlass.actors.policy.config import Operation, SchedulerConfig, program
from windlass.actors.policy.folding import fold
from windlass.actors.policy.pending_replies import Instruction, PendingReplies, UnexpectedEventError
from windlass.actors.policy.trainer_state import StepResult, TrainerState
from windlass.storage.ids import ActorName, BlockIndex, Step


class NotFiniteError(Exception):
    """Gradients are not finite, and the step cannot be skipped or too many were. The text names the step."""


@dataclass(slots=True)
class _StepUpdates:
    """The progress of one step's updates."""

    loss_scale: float
    grad_sq_sums: dict[BlockIndex, float] = field(default_factory=dict)  # of blocks whose gradient is known
    num_at_rest: int = 0  # number of gradients that are in the place where they stay until the update
    kept: dict[BlockIndex, tuple[GradChunk, ...]] = field(default_factory=dict)  # gradients until all are known
    result: StepResult | None = None  # None: not all gradients are known
    trainer_state: str = ""  # set for a skipped step
    optimizer_step: int = 0
    grad_scale: float = 0.0
    num_updated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The facts about a step that are known once all its gradients are."""

    grad_norm: float  # of all gradients, before clipping; NaN if one is not finite and the step is skipped
    loss_scale: float  # of this step
    num_skipped: int  # skipped steps so far, this one included


class Pipeline:
    """Decides the order of one job's work. `handle` takes one event and returns the messages to send."""

    def __init__(self, shape: SchedulerConfig, trainer: TrainerState, initial_step: Step | None = None) -> None:
        """`initial_step` is the commit to resume from, and `trainer` the state after that step."""
        self.shape = shape
        self.trainer = trainer
        self.commits = Commits(shape, initial_step)
        self.waits = PendingReplies(shape.deadline_s, shape.num_groups)
        self.ends: dict[int, StepEnd] = {}  # by step, once all its gradients are known; the caller removes them
        self._program = program(shape, max(self.committed, 0) + 1)
        self._next: Operation | None = next(self._program, None)
        self._running: dict[int, Operation] = {}
        self._steps: dict[int, _StepUpdates] = {}
        self._to_offload = BlockQueue(shape.ordering.queues)
        self._to_update = {is_device: BlockQueue(shape.ordering.queues) for is_device in (False, True)}
        self._grads: dict[tuple[int, int], tuple[GradChunk, ...]] = {}
        self._offloading: set[tuple[int, int]] = set()
        self._updating: dict[tuple[int, int], set[ActorName]] = {}
        # The actors that still have to read their resident states. They are asked to before the first operation.
        self._to_restore = {actor for block in shape.flushed_blocks for actor in shape.holders(block)}
        self._restoring = False
        self._to_skip: int | None = None  # the step that is being skipped, until all its gradients are discarded
        self._exporting = False
        self._to_export: set[int] = set()  # steps to export in addition to those of the program
        self._stopped = False
        self._begun = max(self.committed, 0)  # last step with a granted operation
        self._kept = max(self.committed, 0)  # last step whose trainer state was requested from the caller
        self.final_step = shape.total_steps  # the step whose model is the job's
        self.final_copy_of: str | None = None  # path of the checkpoint that becomes the job's model instead
        self._handlers: dict[type[Message], Callable[..., list[Instruction]]] = {
            ModelLoaded: self._on_model_loaded,
            StatesRestored: self._on_states_restored,
            BlockComputed: self._on_block_computed,
            BlockBackwardDone: self._on_backward_done,
            GradOffloaded: self._on_grad_offloaded,
            BlockUpdated: self._on_block_updated,
            BlockFlushed: self._on_block_flushed,
            StoreCommitted: self._on_store_committed,
            ModelExported: self._on_model_exported,
        }

    # --- calls of the scheduler -------------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """The last committed step; -1 while the model is being loaded."""
        return self.commits.committed

    def start(self, now_s: float) -> list[Instruction]:
        """Returns the first instructions: to load the model, or to resume after the last committed step."""
        if self.committed < 0:
            message = LoadModel(job=self.shape.job, step=Step(0))
            return self.waits.issue([Instruction(self.shape.optimizers[0], message)], now_s)
        return self.waits.issue(self._advance(), now_s)

    def handle(self, event: Message, now_s: float) -> list[Instruction]:
        """Processes one event and returns the next instructions. Raises UnexpectedEventError for unrequested events."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise UnexpectedEventError(f"the scheduler has no handler for {event}")
        instructions = handler(event)
        self.waits.heard_from(self._sender(event), now_s)
        return self.waits.issue([*instructions, *self._advance()], now_s)

    def stop_after_current_step(self, now_s: float) -> list[Instruction]:
        """Stops after the current step. The attempt ends with a commit of it, without an export."""
        self._stopped = True
        self.commits.last_step = min(self.commits.last_step, self._begun)
        return self.waits.issue(self._advance(), now_s)

    @property
    def begun(self) -> int:
        """The last step with a granted operation."""
        return self._begun

    @property
    def next_open_commit(self) -> int:
        """The first commit step whose commit can still record that the step becomes a checkpoint."""
        return self.shape.commit_after(max(self._kept, self._begun - 1))

    def checkpoint_after(self, step: int) -> None:
        """Requests the export of a step that will be committed. The next step waits for it and must not have begun."""
        assert self._begun <= step, f"step {step} is over, and step {self._begun} has begun"
        if step <= self.final_step:
            self._to_export.add(step)

    def finish_after_current_step(self) -> bool:
        """Makes the current step the job's last one, with an export. Returns False if the attempt stops anyway.

        It must be called during the evaluation of the step, because the next step may begin after it.
        """
        if self._stopped:
            return False
        self.final_step = self.commits.last_step = self._begun
        self._to_export = {self._begun}
        return True

    @property
    def finished(self) -> bool:
        """True if all work is done and committed."""
        over = self._next is None or self._next.step > self.commits.last_step or self._is_cut(self._next)
        is_safe = self.committed >= self.commits.last_step
        return over and not self.waits.outstanding and is_safe and (self._stopped or not self._to_export)

    # --- events -----------------------------------------------------------------------------------------------------

    def _on_model_loaded(self, event: ModelLoaded) -> list[Instruction]:
        self.waits.settle("load", 0, 0, self.shape.optimizers[0])
        self.commits.model_loaded(self._trainer_state(Step(0)))
        return []

    def _on_states_restored(self, event: StatesRestored) -> list[Instruction]:
        self.waits.settle("restore", event.step, 0, event.actor)
        self._to_restore.remove(event.actor)
        return []

    def _on_block_computed(self, event: BlockComputed) -> list[Instruction]:
        self.waits.settle("compute", event.op, event.block, self.shape.gpu_worker)
        first = self._running[min(self._running)]
        if event.op != first.op:
            raise UnexpectedEventError(
                f"{self.shape.gpu_worker} finished the {event.phase} of block {event.block} in step {event.step}, and "
                f"not the {first.phase} of block {first.block} in step {first.step}, which comes first: one was lost"
            )
        del self._running[event.op]
        return []

    def _on_backward_done(self, event: BlockBackwardDone) -> list[Instruction]:
        self.waits.settle("gradient", event.step, event.block, self.shape.gpu_worker)
        updates = self._steps[event.step]
        updates.grad_sq_sums[event.block] = event.grad_sq_sum
        if not self.shape.keeps_grads:
            self._check_active(event)
        if event.block in self.shape.device_blocks:
            self._keep(event.step, event.block, ())
        else:
            self._to_offload.push(event.step, event.block)
        if len(updates.grad_sq_sums) < self.shape.num_blocks:
            return []
        return self._on_all_gradients(event.step, updates)

    def _check_active(self, event: BlockBackwardDone) -> None:
        if not math.isfinite(event.grad_sq_sum):
            raise NotFiniteError(
                f"a gradient of step {event.step} is not finite, and its updates have begun: the job ends; step "
                f"{self.committed} is the last that was committed"
            )

    def _on_all_gradients(self, step: Step, updates: _StepUpdates) -> list[Instruction]:
        """Decides whether a step is updated or skipped.

        If gradients are not kept, they are all finite here and the updates have begun.
        """
        # Always summed from the last block to the first, so that the order of arrival does not change any bit.
        grad_sq_sum = fold(updates.grad_sq_sums[BlockIndex(block)] for block in reversed(range(self.shape.num_blocks)))
        is_finite = math.isfinite(grad_sq_sum)
        if self.shape.keeps_grads:
            self._end_step(updates, StepResult.UPDATED if is_finite else StepResult.SKIPPED)
        norm = math.sqrt(grad_sq_sum) / updates.loss_scale if is_finite else math.nan
        num_skipped = step - self.trainer.num_updates
        self.ends[step] = StepEnd(grad_norm=norm, loss_scale=updates.loss_scale, num_skipped=num_skipped)
        kept, updates.kept = updates.kept, {}
        if updates.result is StepResult.SKIPPED:
            if self.trainer.num_bad_steps > self.shape.max_bad_steps:
                raise NotFiniteError(
                    f"the gradients of {self.trainer.num_bad_steps} steps in a row, up to step {step}, were not finite"
                )
            self._to_skip = step
            updates.trainer_state = self._trainer_state(step)
            return [self._drop(step, block, chunks) for block, chunks in kept.items()]
        if self.shape.clip_norm is not None:
            updates.grad_scale *= clip_scale(self.shape.clip_norm, norm)
        for block, chunks in kept.items():
            self._queue_update(step, block, chunks)
        return []

    def _end_step(self, updates: _StepUpdates, result: StepResult) -> None:
        updates.result = result
        updates.grad_scale = 1.0 / updates.loss_scale
        self.trainer.end_step(result)
        updates.optimizer_step = self.trainer.num_updates

    def _on_grad_offloaded(self, event: GradOffloaded) -> list[Instruction]:
        self.waits.settle("offload", event.step, event.block, self.shape.gpu_worker)
        self._offloading.remove((event.step, event.block))
        if self._steps[event.step].result is StepResult.SKIPPED:
            self._steps[event.step].num_at_rest += 1
            return [self._drop(event.step, event.block, event.chunks)]
        self._keep(event.step, event.block, event.chunks)
        return []

    def _keep(self, step: Step, block: BlockIndex, chunks: tuple[GradChunk, ...]) -> None:
        """Records that a gradient is in the place where it stays until the update, and queues the update if allowed."""
        updates = self._steps[step]
        updates.num_at_rest += 1
        if updates.result is None:
            updates.kept[block] = chunks
        else:
            self._queue_update(step, block, chunks)

    def _drop(self, step: Step, block: BlockIndex, chunks: tuple[GradChunk, ...]) -> Instruction:
        message = GradDiscarded(job=self.shape.job, step=step, block=block, chunks=chunks)
        return Instruction(self.shape.gpu_worker, message)

    def _on_block_updated(self, event: BlockUpdated) -> list[Instruction]:
        self.waits.settle("update", event.step, event.block, event.actor)
        key = (event.step, event.block)
        self._updating[key].remove(event.actor)
        if self._updating[key]:
            return []
        del self._updating[key]
        self.commits.block_updated(event.block, event.step)
        updates = self._steps[event.step]
        updates.num_updated += 1
        if updates.num_updated == self.shape.num_blocks:
            del self._steps[event.step]
            self.commits.step_over(event.step, self._trainer_state(event.step))
        return []

    def _trainer_state(self, step: Step) -> str:
        self._kept = step
        return self.shape.trainer_state(step)

    def _on_block_flushed(self, event: BlockFlushed) -> list[Instruction]:
        self.waits.settle("flush", event.step, event.block, event.actor)
        self.commits.block_flushed(event.block, event.actor)
        return []

    def _on_store_committed(self, event: StoreCommitted) -> list[Instruction]:
        self.waits.settle("commit", event.step, 0, event.actor)
        self.commits.store_committed(event.step, event.actor)
        return []

    def _on_model_exported(self, event: ModelExported) -> list[Instruction]:
        self.waits.settle("export", event.step, 0, self.shape.optimizers[0])
        self._exporting = False
        self._to_export.discard(event.step)
        if self._next is not None and self._next.phase is None:
            self._next = next(self._program, None)
        return []

    # --- decisions --------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Instruction]:
        self._skip()
        return [
            *self._grant_offloads(),
            *self._grant_updates(is_device=False),
            *self._grant_updates(is_device=True),
            *self._grant_operations(),
            *self.commits.advance(is_computing=bool(self._running)),
        ]

    def _is_cut(self, operation: Operation) -> bool:
        """Returns whether a stop cancels an operation: the evaluation and the export of the last step."""
        return self._stopped and operation.version == operation.step == self.commits.last_step

    def _next_operation(self) -> Operation | None:
        """Returns the program's next operation or an export that comes before it; None if none may be granted."""
        if self.committed < 0:
            return None
        operation = self._next
        step = min(self._to_export, default=None)
        if step is not None and not self._stopped and (operation is None or operation.step > step):
            return Operation(op=0, step=Step(step), version=Step(step), phase=None, block=BlockIndex(0))
        if operation is None or operation.step > self.commits.last_step or self._is_cut(operation):
            return None
        return operation

    def _is_deciding(self) -> bool:
        """Returns whether an evaluation is running whose result can request a checkpoint or end the job.

        Its result is reported before its last operation is done.
        """
        return self.shape.evaluation_decides and any(
            operation.phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD) for operation in self._running.values()
        )

    def _grant_operations(self) -> list[Instruction]:
        granted: list[Instruction] = []
        while (operation := self._next_operation()) is not None:
            if self._to_restore:
                granted.extend(self._grant_restore())
                break
            if operation.phase is None:
                granted.extend(self._grant_export(operation))
                break
            if operation.step > self._begun and self._is_deciding():
                break
            blocks = self.shape.shared[operation.block]
            if len(self._running) >= self.shape.ordering.max_prefetched:
                break
            waits_for = blocks if self.shape.ordering.overlaps_steps else range(self.shape.num_blocks)
            if any(self.commits.versions[block] < operation.version for block in waits_for):
                break
            self._running[operation.op] = operation
            self._begun = operation.step
            self._next = next(self._program, None)
            granted.extend(self._compute(operation, blocks))
        return granted

    def _compute(self, operation: Operation, blocks: tuple[BlockIndex, ...]) -> list[Instruction]:
        worker, job, op, phase = self.shape.gpu_worker, self.shape.job, operation.op, operation.phase
        assert phase is not None
        fetches = [
            Instruction(
                worker,
                PrefetchParams(
                    job=job,
                    step=self.commits.label(block),
                    op=op,
                    phase=phase,
                    block=block,
                    group=operation.group,
                ),
            )
            for block in blocks
        ]
        compute = ComputeBlock(
            job=job,
            step=operation.step,
            op=op,
            phase=phase,
            block=operation.block,
            blocks=blocks,
            group=operation.group,
            loss_scale=self._loss_scale(operation),
        )
        return [*fetches, Instruction(worker, compute)]

    def _loss_scale(self, operation: Operation) -> float:
        """Returns the loss scale of an operation. The first head of a step also creates the step's update record."""
        if operation.phase is not Phase.HEAD:
            return 1.0
        if operation.group > 0:
            return self._steps[operation.step].loss_scale
        updates = self._steps[operation.step] = _StepUpdates(self.trainer.next_loss_scale)
        if not self.shape.keeps_grads:
            self._end_step(updates, StepResult.UPDATED)  # a gradient that is not finite ends the job instead
        return updates.loss_scale

    def _skip(self) -> None:
        """Ends a skipped step once all its gradients are discarded."""
        step = self._to_skip
        if step is None or self._steps[step].num_at_rest < self.shape.num_blocks:
            return
        self._to_skip = None
        self.commits.step_over(Step(step), self._steps.pop(step).trainer_state)

    def _grant_restore(self) -> list[Instruction]:
        if self._restoring:
            return []
        self._restoring = True
        message = RestoreStates(job=self.shape.job, step=Step(self.committed))
        return [Instruction(actor, message) for actor in sorted(self._to_restore)]

    def _grant_export(self, operation: Operation) -> list[Instruction]:
        if self._exporting or self._running or self.committed < operation.version:
            return []
        self._exporting = True
        is_final = operation.step == self.final_step
        path = self.shape.output_dir if is_final else self.shape.path_of_checkpoint(operation.step)
        copy_of = self.final_copy_of if is_final else None
        message = ExportModel(job=self.shape.job, step=operation.step, path=path, copy_of=copy_of)
        return [Instruction(self.shape.optimizers[0], message)]

    def _grant_offloads(self) -> list[Instruction]:
        granted = []
        while self._to_offload and len(self._offloading) < self.shape.ordering.max_offloading:
            step, block = self._to_offload.first
            # On the SSDs, the gradient overwrites states of an older commit, so step - 1 must be committed.
            if block in self.shape.spilled_blocks and self.committed < step - 1:
                break
            self._to_offload.pop()
            self._offloading.add((step, block))
            message = OffloadGrad(job=self.shape.job, step=Step(step), block=BlockIndex(block))
            granted.append(Instruction(self.shape.gpu_worker, message))
        return granted

    def _queue_update(self, step: int, block: BlockIndex, chunks: tuple[GradChunk, ...]) -> None:
        self._grads[(step, block)] = chunks
        self._to_update[block in self.shape.device_blocks].push(step, block)

    def _grant_updates(self, *, is_device: bool) -> list[Instruction]:
        granted: list[Instruction] = []
        queue = self._to_update[is_device]
        num_updating = sum((block in self.shape.device_blocks) == is_device for _, block in self._updating)
        ordering = self.shape.ordering
        limit = ordering.max_updating_on_device if is_device else ordering.max_updating
        while queue and num_updating < limit and self.commits.may_update(queue.first[0]):
            step, block = queue.pop()
            num_updating += 1
            chunks = self._grads.pop((step, block))
            holders = self.shape.holders(block)
            self._updating[(step, block)] = set(holders)
            for actor in holders:
                # Empty for the GPU worker, because the gradients of its blocks never left the device.
                share = tuple(chunk for chunk in chunks if self.shape.optimizer_of(chunk.key) == actor)
                granted.append(Instruction(actor, self._update(step, block, share)))
        return granted

    def _update(self, step: int, block: int, chunks: tuple[GradChunk, ...]) -> UpdateBlock:
        return UpdateBlock(
            job=self.shape.job,
            step=Step(step),
            block=BlockIndex(block),
            from_step=self.commits.label(BlockIndex(block)),
            chunks=chunks,
            optimizer_step=self._steps[step].optimizer_step,
            learning_rate=self.shape.learning_rate(step),
            grad_scale=self._steps[step].grad_scale,
        )

    def _sender(self, event: Message) -> ActorName:
        if isinstance(event, BlockUpdated | BlockFlushed | StatesRestored | StoreCommitted):
            return event.actor
        if isinstance(event, ModelLoaded | ModelExported):
            return self.shape.optimizers[0]
        return self.shape.gpu_worker
