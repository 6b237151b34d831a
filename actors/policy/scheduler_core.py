"""The scheduler's core: events in, instructions out. No clock, no I/O, no Ray.

It grants operations to the ranks, which are the job's GPU workers, and it lets the actors update a step
(`step_updates.py`). Within that the workers decide. Their queues for gradient offloads and updates
(`worker_queues.py`) are ordered by (step, block), smallest first. So the next forward pass begins while later blocks
are still being updated.
Source: AutoHete, section 3.3.

The forward pass of block i in step t+1 waits only for the update of block i in step t. With clipping or loss scaling,
updates wait for all gradients and then run in forward order.
For comparisons, queues can be in order of arrival, and steps can run without overlap (`block_queue.py`).

Each rank has its own operations (`rank_queue.py`), and may be ahead of the others. All ranks wait at an export, and for
an evaluation whose result can request a checkpoint or end the job.
"""

from collections.abc import Callable

from windlass.actors.messages import (
    BlockComputed,
    BlockFlushed,
    BlockUpdated,
    CommitReached,
    ComputeBlock,
    ComputeBlocks,
    ComputeProgressed,
    Event,
    ExportModel,
    GradReady,
    LoadModel,
    ModelExported,
    ModelLoaded,
    Phase,
    RestoreStates,
    StatesRestored,
    StoreCommitted,
    StoredParams,
)
from windlass.actors.policy.actions import Action, DecideCommit
from windlass.actors.policy.commits import Commits
from windlass.actors.policy.config import Operation, SchedulerConfig
from windlass.actors.policy.pending_replies import (
    Instruction,
    PendingReplies,
    UnexpectedEventError,
    completes_gradient,
)
from windlass.actors.policy.rank_queue import PassedResults, RankQueue
from windlass.actors.policy.step_updates import StepUpdates
from windlass.actors.policy.trainer_state import TrainerState
from windlass.actors.worker_policy import GRANTED_AHEAD, REPORT_EVERY, round_of
from windlass.storage.ids import ActorName, BlockIndex, Step


class Pipeline:
    """Decides the order of one job's work. `handle` takes one event and returns what to do."""

    def __init__(self, config: SchedulerConfig, trainer: TrainerState, initial_step: Step | None = None) -> None:
        """`initial_step` is the commit to resume from, and `trainer` the state after that step."""
        self.config = config
        self.trainer = trainer
        self.commits = Commits(config, initial_step)
        self.waits = PendingReplies(config.deadline_s, config.num_groups)
        first_step = max(self.committed, 0) + 1
        self._ranks = {
            actor: RankQueue(config, rank, first_step, index)
            for index, stage in enumerate(config.stages)
            for rank, actor in enumerate(stage.gpu_workers)
        }
        self._passed = PassedResults(config.num_blocks)
        self._early_grads: list[GradReady] = []  # gradients of the head, before all losses of their step are reported
        self._updates = StepUpdates(config, trainer, self.commits, self.waits)
        # The actors that still have to read their resident states. They are asked to before the first operation.
        self._to_restore = {actor for block in config.flushed_blocks for actor in config.holders(block)}
        self._restoring = False
        self._loading: set[ActorName] = set()  # actors that load the blocks of their boxes
        self._exporting = False
        self._to_export: set[int] = set()  # steps to export in addition to those of the program
        self._stopped = False
        # The last operation of an evaluation that any rank has begun: its step, its round and its block. On several
        # boxes it is its group and not its round, because a round may be other groups on another box.
        self._evaluated_to = (Step(0), 0, BlockIndex(0))
        self._last_started_step = max(self.committed, 0)  # the last step with an operation granted to any rank
        self._last_commit_sent = -1  # the last commit reported to the GPU worker that completes gradients
        self.final_step = config.total_steps  # the step whose model is the job's
        self._final_copy_of: str | None = None  # path of the checkpoint that becomes the job's model instead
        self._handlers: dict[type[Event], Callable[..., list[Action]]] = {
            ModelLoaded: self._on_model_loaded,
            StatesRestored: self._on_states_restored,
            ComputeProgressed: self._on_compute_progressed,
            BlockUpdated: self._updates.on_block_updated,
            BlockFlushed: self._on_block_flushed,
            StoreCommitted: self._on_store_committed,
            ModelExported: self._on_model_exported,
        }

    # --- calls of the scheduler -------------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """The last committed step; -1 while the model is being loaded."""
        return self.commits.committed

    def start(self, now_s: float) -> list[Action]:
        """Returns the first instructions: to load the model, or to resume after the last committed step."""
        if self.committed < 0:
            message = LoadModel(job=self.config.job, step=Step(0))
            self._loading = set(self.config.model_movers)
            return self._issue([Instruction(actor, message) for actor in self.config.model_movers], now_s)
        return self._issue(self._advance(), now_s)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Processes one event and returns the next instructions. Raises UnexpectedEventError for unrequested events."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise UnexpectedEventError(f"the scheduler has no handler for {event}")
        actions = handler(event)
        self.waits.heard_from(event.actor, now_s)
        return self._issue([*actions, *self._advance()], now_s)

    def commit_decided(self, step: Step, now_s: float) -> list[Action]:
        """Records that a `DecideCommit` is carried out: the step is committed. Returns the next instructions."""
        return self._issue([*self.commits.decided(step), *self._advance()], now_s)

    def stop_after_current_step(self, now_s: float) -> list[Action]:
        """Stops after the current step. The attempt ends with a commit of it, without an export."""
        self._stopped = True
        self.commits.last_step = min(self.commits.last_step, self._last_started_step)
        return self._issue(self._advance(), now_s)

    @property
    def is_loading(self) -> bool:
        """True until all boxes have loaded the model's weights."""
        return bool(self._loading)

    @property
    def last_started_step(self) -> int:
        """The last step with a granted operation."""
        return self._last_started_step

    @property
    def next_open_commit(self) -> int:
        """The first commit step whose commit can still record that the step becomes a checkpoint."""
        return self.config.commit_after(max(self._updates.last_ended, self._last_started_step - 1))

    def checkpoint_after(self, step: int) -> None:
        """Requests the export of a step that will be committed. The next step waits for it and must not have begun."""
        assert self._last_started_step <= step, f"step {step} is over, and step {self._last_started_step} has begun"
        if step <= self.final_step:
            self._to_export.add(step)

    def finish_after_current_step(self) -> bool:
        """Makes the current step the job's last one, with an export. Returns False if the attempt stops anyway.

        It must be called during the evaluation of the step, because the next step may begin after it.
        """
        if self._stopped:
            return False
        self.final_step = self.commits.last_step = self._last_started_step
        self._to_export = {self._last_started_step}
        return True

    def export_copy_of(self, path: str) -> None:
        """Makes the checkpoint in `path` the job's model, instead of that of the last step."""
        self._final_copy_of = path

    @property
    def copies_final_model(self) -> bool:
        """True if the job's model is a copy of an earlier checkpoint."""
        return self._final_copy_of is not None

    @property
    def finished(self) -> bool:
        """True if all work is done and committed."""
        over = all(rank.next is None or self._is_beyond_end(rank, rank.next) for rank in self._ranks.values())
        is_safe = self.committed >= self.commits.last_step
        return over and not self.waits.outstanding and is_safe and (self._stopped or not self._to_export)

    def check_invariants(self) -> None:
        """Checks what must be true between two events; for tests."""
        for rank in self._ranks.values():
            assert len(rank.running) <= self.config.ordering.max_prefetched + GRANTED_AHEAD
            assert list(rank.running) == sorted(rank.running)
        self._updates.check_invariants()

    # --- events -----------------------------------------------------------------------------------------------------

    def _on_model_loaded(self, event: ModelLoaded) -> list[Action]:
        self.waits.resolve(ModelLoaded, event.step, event.actor)
        self._loading.remove(event.actor)
        if self._loading:
            return []
        self.commits.model_loaded()
        return [self._updates.end_step(Step(0), None)]

    def _on_states_restored(self, event: StatesRestored) -> list[Action]:
        self.waits.resolve(StatesRestored, event.step, event.actor)
        self._to_restore.remove(event.actor)
        return []

    def _on_compute_progressed(self, event: ComputeProgressed) -> list[Action]:
        for computed in event.computed:
            self._on_block_computed(computed, event.actor)
        early, self._early_grads = self._early_grads, []
        actions = [action for grad in early for action in self._on_gradient(grad)]
        for grad in event.grads:
            self.waits.resolve(GradReady, grad.step, event.actor, grad.block)
            actions += self._on_gradient(grad)
        return actions

    def _on_block_computed(self, computed: BlockComputed, actor: ActorName) -> None:
        self.waits.resolve(BlockComputed, computed.op, actor, computed.block)
        rank = self._ranks[actor]
        self._passed.computed(rank.computed(computed), rank.blocks)

    def _on_gradient(self, grad: GradReady) -> list[Action]:
        """Processes a gradient. That of the head waits for all losses of its step, because the step's end needs them.

        The reports of other ranks may be slower.
        """
        if not self.config.keeps_grads:
            self._updates.require_finite(grad)
        if self._misses_losses(grad):
            self._early_grads.append(grad)
            return []
        return self._updates.add_gradient(grad)

    def _misses_losses(self, grad: GradReady) -> bool:
        """Returns whether a gradient is that of the head, and other ranks have not reported all losses of the step."""
        last = self.config.grads_worker(self.config.stages[-1])
        others = (rank for rank in self._ranks.values() if rank.actor != last)
        running = (operation for rank in others for operation in rank.running.values())
        return grad.block == self.config.num_blocks - 1 and any(
            operation.phase is Phase.HEAD and operation.step == grad.step for operation in running
        )

    def _on_block_flushed(self, event: BlockFlushed) -> list[Action]:
        self.waits.resolve(BlockFlushed, event.step, event.actor, event.block)
        self.commits.block_flushed(event.block, event.actor)
        return []

    def _on_store_committed(self, event: StoreCommitted) -> list[Action]:
        self.waits.resolve(StoreCommitted, event.step, event.actor)
        is_complete = self.commits.store_committed(event.step, event.actor)
        return [DecideCommit(step=event.step)] if is_complete else []

    def _on_model_exported(self, event: ModelExported) -> list[Action]:
        self.waits.resolve(ModelExported, event.step, event.actor)
        self._exporting = False
        self._to_export.discard(event.step)
        for rank in self._ranks.values():
            rank.exported(event.step)
        return []

    # --- decisions --------------------------------------------------------------------------------------------------

    def _issue(self, actions: list[Action], now_s: float) -> list[Action]:
        """Records the replies that the scheduler waits for from now on."""
        self.waits.issue([action for action in actions if isinstance(action, Instruction)], now_s)
        self._updates.issue(now_s)
        if len(self._ranks) > 1:
            waiting = (actor for actor, rank in self._ranks.items() if self._passed.is_missed_by(rank))
            self.waits.excuse(frozenset(waiting), now_s)
        return actions

    def _advance(self) -> list[Action]:
        return [
            *self._send_commit_reached(),
            *self._grant_operations(),
            *self._updates.grant(),
            *self.commits.advance(is_computing=self._is_computing),
        ]

    @property
    def _is_computing(self) -> bool:
        return any(rank.running for rank in self._ranks.values())

    def _send_commit_reached(self) -> list[Instruction]:
        """Reports a commit to the GPU workers that offload gradients, if some go to the SSDs."""
        if not self.config.spilled_blocks or self._last_commit_sent == self.committed:
            return []
        self._last_commit_sent = self.committed
        message = CommitReached(job=self.config.job, step=Step(self.committed))
        return [Instruction(self.config.grads_worker(stage), message) for stage in self.config.stages]

    def _is_beyond_end(self, rank: RankQueue, operation: Operation) -> bool:
        """Returns whether an operation is left out.

        It comes after the last step, or a stop cancels it: the evaluation and the export of the last step.
        """
        last_step = self.commits.last_step
        if operation.step > last_step:
            return True
        return (
            self._stopped and operation.version == operation.step == last_step and not self._is_shared(rank, operation)
        )

    def _is_shared(self, rank: RankQueue, operation: Operation) -> bool:
        """Returns whether an operation of an evaluation uses params together with one that another rank has begun.

        It is granted though the attempt stops, because the params stay in their slots until all have copied them. And
        the hidden states of a group that one box has begun stay in their slots until the next box has taken them.
        """
        round_index = round_of(operation.group, rank.num_ranks)
        step, place, block = self._evaluated_to
        if len(self.config.stages) > 1:
            return operation.evaluates and (operation.step, round_index) <= (step, round_of(place, rank.num_ranks))
        return operation.evaluates and (operation.step, round_index, operation.block) <= (step, place, block)

    def _note_evaluated(self, rank: RankQueue, operation: Operation) -> None:
        """Records that an operation of an evaluation is granted."""
        has_several = len(self.config.stages) > 1
        place = operation.group if has_several else round_of(operation.group, rank.num_ranks)
        self._evaluated_to = max(self._evaluated_to, (operation.step, place, operation.block))

    def _next_operation(self, rank: RankQueue) -> Operation | None:
        """Returns a rank's next operation or an export that comes before it; None if none may be granted."""
        if self.committed < 0:
            return None
        operation = rank.next
        step = min(self._to_export, default=None)
        if step is not None and not self._stopped and (operation is None or operation.step > step):
            return Operation(op=0, step=Step(step), version=Step(step), phase=None, block=BlockIndex(0))
        return None if operation is None or self._is_beyond_end(rank, operation) else operation

    def _has_to_evaluate(self, before: Step) -> bool:
        """Returns whether an evaluation must be over before a step begins.

        Its result can request a checkpoint or end the job. It is reported before its last operation is done. Or a rank
        has no group of the step: then nothing else keeps the step's updates from changing the params that it reads.
        """
        decides = self.config.evaluation_decides
        return any(rank.is_evaluating(before) for rank in self._ranks.values() if decides or not rank.trains)

    def _grant_operations(self) -> list[Instruction]:
        """Grants each rank its next operations, or the export that all of them have reached."""
        if self._to_restore:
            is_due = any(self._next_operation(rank) is not None for rank in self._ranks.values())
            return self._grant_restore() if is_due else []
        granted = [
            self._compute(rank.actor, operations) for rank in self._ranks.values() if (operations := self._grant(rank))
        ]
        return [*granted, *self._grant_export()]

    def _grant(self, rank: RankQueue) -> list[ComputeBlock]:
        """Grants a rank operations whose params are there.

        Grants in batches: while many operations are outstanding, it waits until REPORT_EVERY more fit.

        A step begins only when few operations of the step before are left, because a stop ends with the step that has
        begun.
        """
        few = self.config.ordering.max_prefetched
        limit = few + GRANTED_AHEAD
        granted: list[ComputeBlock] = []
        if len(rank.running) > limit - REPORT_EVERY:
            return granted
        while (operation := self._next_operation(rank)) is not None and operation.phase is not None:
            begins_step = operation.step > self._last_started_step
            if len(rank.running) >= (few if begins_step else limit) or not self._has_params(operation):
                break
            if self._needs_result(operation) and self._updates.is_open_before(operation.step):
                break  # only on several boxes: another box has not made all updates of the step before
            if begins_step and self._has_to_evaluate(operation.step):
                break
            rank.begin(operation)
            if operation.evaluates:
                self._note_evaluated(rank, operation)
            self._last_started_step = max(self._last_started_step, operation.step)
            granted.append(self._operation(operation))
        return granted

    def _has_params(self, operation: Operation) -> bool:
        """Returns whether the params that an operation reads are updated and, if steps do not overlap, all others."""
        overlaps = self.config.ordering.overlaps_steps
        blocks = self.config.shared[operation.block] if overlaps else range(self.config.num_blocks)
        return all(self.commits.versions[block] >= operation.version for block in blocks)

    def _needs_result(self, operation: Operation) -> bool:
        """Returns whether an operation needs the step's loss scale, or a place for a gradient that it completes."""
        is_last = operation.group == self.config.num_groups - 1
        return operation.phase is Phase.HEAD or (operation.adds_gradients and is_last)

    def _compute(self, actor: ActorName, operations: list[ComputeBlock]) -> Instruction:
        return Instruction(
            actor, ComputeBlocks(job=self.config.job, step=operations[0].step, operations=tuple(operations))
        )

    def _operation(self, operation: Operation) -> ComputeBlock:
        assert operation.phase is not None
        blocks = self.config.shared[operation.block]
        granted = ComputeBlock(
            job=self.config.job,
            step=operation.step,
            op=operation.op,
            phase=operation.phase,
            block=operation.block,
            params=tuple(StoredParams(block, self.commits.label(block)) for block in blocks),
            group=operation.group,
            loss_scale=self._updates.loss_scale(operation.step) if operation.phase is Phase.HEAD else 1.0,
        )
        if completes_gradient(granted, self.config.num_groups - 1):
            self._updates.expect_gradient(operation.step, operation.block)
        return granted

    def _grant_restore(self) -> list[Instruction]:
        if self._restoring:
            return []
        self._restoring = True
        message = RestoreStates(job=self.config.job, step=Step(self.committed))
        return [Instruction(actor, message) for actor in sorted(self._to_restore)]

    def _grant_export(self) -> list[Instruction]:
        """Grants the export that all ranks have reached, if it may begin."""
        if self._exporting or self._is_computing:
            return []
        reached = [self._next_operation(rank) for rank in self._ranks.values()]
        operation = reached[0]
        if operation is None or any(each is None or each.phase is not None for each in reached):
            return []
        if self.committed < operation.version:
            return []
        is_final = operation.step == self.final_step
        path = self.config.output_dir if is_final else self.config.path_of_checkpoint(operation.step)
        copy_of = self._final_copy_of if is_final else None
        self._exporting = True
        message = ExportModel(job=self.config.job, step=operation.step, path=path, copy_of=copy_of)
        return [Instruction(self.config.model_movers[0], message)]
