"""Decides the updates of steps, from the first operation that completes a gradient to the last block's update.

A step's result is known once all its gradients are: it is updated, or skipped as one of them is not finite. Blocks
whose gradients need not be kept are updated before that.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from windlass.actors.messages import BlockUpdated, GradReady, SkipStep, UpdateStep
from windlass.actors.policy.actions import Action, EndStep, StepEnd
from windlass.actors.policy.block_states import BlockInStep, BlockState
from windlass.actors.policy.clipping import clip_scale
from windlass.actors.policy.commits import Commits
from windlass.actors.policy.config import SchedulerConfig
from windlass.actors.policy.folding import fold
from windlass.actors.policy.pending_replies import Instruction, PendingReplies
from windlass.actors.policy.trainer_state import StepResult, TrainerState
from windlass.storage.ids import BlockIndex, Step


class NotFiniteError(Exception):
    """Gradients are not finite, and the step cannot be skipped or too many were. The text names the step."""


@dataclass(slots=True)
class _Progress:
    """The progress of one step's updates."""

    loss_scale: float
    blocks: dict[BlockIndex, BlockInStep] = field(default_factory=dict)  # those whose last operation is granted
    sq_sums: dict[BlockIndex, tuple[float, ...]] = field(default_factory=dict)  # of blocks whose gradient is known
    result: StepResult | None = None  # None: not all gradients are known
    end: StepEnd | None = None  # set once all gradients are known
    optimizer_step: int = 0
    grad_scale: float = 0.0
    update_sent: bool = False  # UpdateStep was sent
    num_updated: int = 0


class StepUpdates:
    """The steps of one attempt whose updates are not over."""

    def __init__(self, config: SchedulerConfig, trainer: TrainerState, commits: Commits, waits: PendingReplies) -> None:
        """All but `config` are shared with the caller."""
        self.last_ended = max(commits.committed, 0)  # the last step with an `EndStep`
        self._config = config
        self._trainer = trainer
        self._commits = commits
        self._waits = waits
        self._steps: dict[int, _Progress] = {}
        self._updating: list[BlockInStep] = []  # blocks whose updates will be added to the pending replies

    def is_open_before(self, step: Step) -> bool:
        """Returns whether updates of an earlier step are not over."""
        return any(earlier < step for earlier in self._steps)

    def check_invariants(self) -> None:
        """Checks what must be true between two events; for tests."""
        for updates in self._steps.values():
            states = [each.state for each in updates.blocks.values()]
            assert states.count(BlockState.UPDATED) == updates.num_updated < self._config.num_blocks
            assert len(states) - states.count(BlockState.COMPUTING) == len(updates.sq_sums)
            assert BlockState.DISCARDED not in states, "a skipped step is over at once"
            assert (BlockState.KEPT in states) <= (not updates.update_sent)
            assert all(bool(each.missing) == (each.state is BlockState.UPDATING) for each in updates.blocks.values())

    # --- gradients --------------------------------------------------------------------------------------------------

    def loss_scale(self, step: Step) -> float:
        """Returns the factor on a step's loss."""
        return self._updates_of(step).loss_scale

    def expect_gradient(self, step: Step, block: BlockIndex) -> None:
        """Records that the operation which completes a gradient is granted."""
        self._updates_of(step).blocks[block] = BlockInStep(step, block)

    def _updates_of(self, step: Step) -> _Progress:
        """Returns the update record of a step, whose result or whose loss scale is needed.

        The first operation that needs it creates it. The step before is over then, so its end is recorded.
        """
        if step not in self._steps:
            updates = self._steps[step] = _Progress(self._trainer.next_loss_scale)
            if not self._config.keeps_grads:
                self._decide(updates, StepResult.UPDATED)  # a gradient that is not finite ends the job instead
        return self._steps[step]

    def require_finite(self, grad: GradReady) -> None:
        """Raises NotFiniteError if a gradient is not finite. Its step cannot be skipped, as its updates have begun."""
        if not grad.is_finite:
            raise NotFiniteError(
                f"a gradient of step {grad.step} is not finite, and its updates have begun: the job ends; step "
                f"{self._commits.committed} is the last that was committed"
            )

    def add_gradient(self, grad: GradReady) -> list[Action]:
        """Processes a gradient that is in its final place."""
        updates = self._steps[grad.step]
        updates.sq_sums[grad.block] = grad.sq_sums
        block = updates.blocks[grad.block]
        block.become(BlockState.KEPT)
        actions: list[Action] = []
        if len(updates.sq_sums) == self._config.num_blocks:
            actions += self._on_all_gradients(grad.step, updates)
        if updates.update_sent:
            actions += self._await_update(block)
        return actions

    def _on_all_gradients(self, step: Step, updates: _Progress) -> list[Action]:
        """Decides whether a step is updated or skipped.

        If gradients are not kept, they are all finite here and the updates have begun.
        """
        grad_sq_sum = self._fold_sq_sums(updates.sq_sums)
        is_finite = math.isfinite(grad_sq_sum)
        if self._config.keeps_grads:
            self._decide(updates, StepResult.UPDATED if is_finite else StepResult.SKIPPED)
        norm = math.sqrt(grad_sq_sum) / updates.loss_scale if is_finite else math.nan
        num_skipped = step - self._trainer.num_updates
        updates.end = StepEnd(grad_norm=norm, loss_scale=updates.loss_scale, num_skipped=num_skipped)
        if updates.result is StepResult.SKIPPED:
            return self._skip(step, updates)
        if self._config.clip_norm is not None:
            updates.grad_scale *= clip_scale(self._config.clip_norm, norm)
        return []

    def _fold_sq_sums(self, sq_sums: Mapping[BlockIndex, tuple[float, ...]]) -> float:
        """Adds the sums of squares of all gradients in a fixed order, so that their arrival does not change any bit.

        With one lane, the last block's sum comes first. With several, the chunks are in order, from the first block on.
        """
        blocks = range(self._config.num_blocks)
        in_order = blocks if self._config.has_lanes else reversed(blocks)
        return fold(sq_sum for block in in_order for sq_sum in sq_sums[BlockIndex(block)])

    def _decide(self, updates: _Progress, result: StepResult) -> None:
        updates.result = result
        updates.grad_scale = 1.0 / updates.loss_scale
        self._trainer.end_step(result)
        updates.optimizer_step = self._trainer.num_updates

    def _skip(self, step: Step, updates: _Progress) -> list[Action]:
        """Discards all gradients of a step, which is over then."""
        if self._trainer.num_bad_steps > self._config.max_bad_steps:
            raise NotFiniteError(
                f"the gradients of {self._trainer.num_bad_steps} steps in a row, up to step {step}, were not finite"
            )
        for block in updates.blocks.values():
            block.become(BlockState.DISCARDED)
        del self._steps[step]
        message = SkipStep(job=self._config.job, step=step)
        self._commits.step_over(step)
        skips = [Instruction(actor, message) for actor in self._config.updating_actors]
        return [*skips, self.end_step(step, updates.end)]

    # --- updates ----------------------------------------------------------------------------------------------------

    def grant(self) -> list[Instruction]:
        """Lets the actors update steps whose result is known, once the commit before them is complete."""
        granted: list[Instruction] = []
        for step, updates in self._steps.items():
            if updates.result is not StepResult.UPDATED or updates.update_sent or not self._commits.may_update(step):
                continue
            updates.update_sent = True
            for block in updates.blocks.values():
                if block.state is BlockState.KEPT:
                    self._await_update(block)  # UpdateStep was not sent yet, so no BlockUpdated can have arrived
            message = UpdateStep(
                job=self._config.job,
                step=Step(step),
                from_step=self._commits.common_label,
                optimizer_step=updates.optimizer_step,
                learning_rate=self._config.learning_rate(step),
                grad_scale=updates.grad_scale,
            )
            granted += [Instruction(actor, message) for actor in self._config.updating_actors]
        return granted

    def issue(self, now_s: float) -> None:
        """Records the updates that the scheduler waits for from now on."""
        for block in self._updating:
            for actor in self._config.holders(block.block):
                if actor in block.missing:
                    self._waits.expect_update(block.step, block.block, actor, now_s)
        self._updating = []

    def _await_update(self, block: BlockInStep) -> list[Action]:
        """Waits for the update of a block, as its gradient is there and the actors may update it."""
        block.become(BlockState.UPDATING)
        block.missing = set(self._config.holders(block.block)) - block.early
        self._updating.append(block)
        return [] if block.missing else self._block_updated(block)

    def on_block_updated(self, event: BlockUpdated) -> list[Action]:
        """Processes an actor's report that its share of a block is updated."""
        if self._is_early(event):
            self._steps[event.step].blocks[event.block].early.add(event.actor)
            return []
        self._waits.resolve(BlockUpdated, event.step, event.actor, event.block)
        block = self._steps[event.step].blocks[event.block]
        block.missing.remove(event.actor)
        return [] if block.missing else self._block_updated(block)

    def _is_early(self, event: BlockUpdated) -> bool:
        """Returns whether an actor's report has overtaken that of the block's gradient, which another actor sends."""
        updates = self._steps.get(event.step)
        block = None if updates is None else updates.blocks.get(event.block)
        if updates is None or block is None or not updates.update_sent or block.state is not BlockState.COMPUTING:
            return False
        return event.actor in self._config.holders(event.block) and event.actor not in block.early

    def _block_updated(self, block: BlockInStep) -> list[Action]:
        step, updates = block.step, self._steps[block.step]
        block.become(BlockState.UPDATED)
        self._commits.block_updated(block.block, step)
        updates.num_updated += 1
        if updates.num_updated < self._config.num_blocks:
            return []
        del self._steps[step]
        self._commits.step_over(step)
        return [self.end_step(step, updates.end)]

    def end_step(self, step: Step, end: StepEnd | None) -> EndStep:
        """Records that a step is over. `end` is None for step 0."""
        self.last_ended = step
        return EndStep(step=step, end=end, trainer=self._trainer.to_json())
