"""A world that carries out a policy's instructions in any order, and checks each one when it is issued.

It keeps its own record of the state, and never asks the policy.
"""

import copy
import math
from collections.abc import Sequence

import pytest

from tests.support.policy.facts import Facts, Pending
from tests.support.policy.jobs import (
    EVALUATION,
    JOB,
    TRAINING,
    WITH_GRADIENT,
    holders,
)
from windlass.actors.messages import (
    BlockFlushed,
    CommitDecided,
    CommitReached,
    CommitStore,
    ComputeBlock,
    ComputeBlocks,
    ComputeProgressed,
    ExportModel,
    FlushBlock,
    LoadModel,
    Message,
    Phase,
    RestoreStates,
    SkipStep,
    UpdateStep,
)
from windlass.actors.policy.actions import Action, DecideCommit, EndStep
from windlass.actors.policy.config import SchedulerConfig
from windlass.actors.policy.pending_replies import Instruction
from windlass.actors.policy.scheduler_core import Pipeline
from windlass.actors.policy.step_updates import NotFiniteError
from windlass.actors.policy.trainer_state import TrainerState
from windlass.actors.worker_policy.worker_queues import GRANTED_AHEAD
from windlass.storage.ids import ActorName, Step


class World(Facts):
    """Holds a policy's instructions in flight. `deliver` makes one of its `choices` happen."""

    def __init__(
        self,
        shape: SchedulerConfig,
        initial_step: int | None = None,
        *,
        bad: frozenset[tuple[int, int]] = frozenset(),
        scales_loss: bool = False,
        best: frozenset[int] = frozenset(),
        finish_at: int | None = None,
    ) -> None:
        """`best`: steps whose evaluation asks for a checkpoint; `finish_at`: the step whose evaluation ends the job."""
        super().__init__(shape, initial_step, bad=bad, scales_loss=scales_loss)
        self.best, self.finish_at, self.initial_step = best, finish_at, initial_step or 0
        trainer = TrainerState(scales_loss=scales_loss)
        trainer.restore(self.expected_trainer(initial_step or 0))
        self.pipeline = Pipeline(self.shape, trainer, None if initial_step is None else Step(initial_step))
        # Steps whose end was recorded; at first no step is decided.
        self.captured = [self.last_good(self.committed)]
        self.complete_by_policy = self.last_complete

    def fork(self) -> "World":
        """An independent copy. The policy's program must be copyable."""
        shared = (self.shape, self.expected, self.bad, self.skipped)
        return copy.deepcopy(self, {id(each): each for each in shared})

    def _take_end(self, over: EndStep) -> None:
        """Checks that the policy ends each step once, with the trainer's state before the next step changes it."""
        step = over.step
        assert step not in self.captured
        self.captured.append(step)
        assert step == self._last_decided()
        assert over.trainer == self.expected_trainer(step)
        assert (over.end is None) == (step == 0)
        if over.end is not None:
            norm = math.nan if step in self.skipped else self.grad_norm(step)
            assert over.end.grad_norm == pytest.approx(norm, rel=1e-12, abs=0.0, nan_ok=True)
            assert over.end.loss_scale == self.expected_loss_scale(step)
            assert over.end.num_skipped == sum(each <= step for each in self.skipped)

    # --- what bad gradients lead to ---------------------------------------------------------------------------------

    def _expected_failure(self, event: Message, committed: int) -> str | None:
        """The error that the policy must raise after this event; None if it can continue.

        `committed`: the last committed step before the event.
        """
        if not isinstance(event, ComputeProgressed):
            return None
        if not self.shape.keeps_grads:
            is_bad = bool(event.grads) and (event.step, event.grads[0].block) in self.bad
            text = f"a gradient of step {event.step} is not finite.*; step {committed} is the last that was committed"
            return text if is_bad else None
        num = self.num_skipped_in_a_row(event.step)
        if not self._gradients_complete(event.step) or num <= self.shape.max_bad_steps:
            return None
        return f"gradients of {num} steps in a row, up to step {event.step}, were not finite"

    # --- making it happen -------------------------------------------------------------------------------------------

    def start(self, now_s: float = 0.0) -> None:
        self._take(self.pipeline.start(now_s), now_s)

    def deliver(self, pending: Pending, now_s: float = 0.0) -> list[Action]:
        """Delivers an event, and checks the instructions that the policy answers with."""
        event = pending.event
        committed = self.committed  # the report of a bad gradient, if it comes last, commits nothing
        self.account(event)
        self.delivered.append(event)
        if (text := self._expected_failure(event, committed)) is not None:
            with pytest.raises(NotFiniteError, match=text):
                self.pipeline.handle(event, now_s)
            self.failed = True
            return []
        if self.shape.evaluation_decides and self.is_end_of_evaluation(event):
            self._decide(int(event.step))
        return self._take(self.pipeline.handle(event, now_s), now_s)

    def _decide(self, step: int) -> None:
        """Does what the shell does before the policy receives the end of an evaluation."""
        if step in self.best:
            self.checkpoint_after(step)
        if step == self.finish_at:
            self.pipeline.finish_after_current_step()
            if self.stopped_at is None:
                self.expect_end(step)

    def want_checkpoint(self) -> int:
        """Asks for a checkpoint, as the shell does after some time. Returns the checkpoint's step."""
        step = self.pipeline.next_open_commit
        is_kept = max(self.captured[-1], self.initial_step)
        open_steps = range(max(is_kept + 1, self.begun), self.shape.total_steps)
        assert step == min(filter(self.is_due_for_commit, open_steps), default=self.shape.total_steps)
        self.checkpoint_after(step)
        return step

    def checkpoint_after(self, step: int) -> None:
        self.pipeline.checkpoint_after(step)
        if self.stopped_at is None and step <= self.final_step:
            self.expect_export(step)

    def stop(self) -> None:
        if self.stopped_at is None:
            self.stopped_at = self.begun
        self._take(self.pipeline.stop_after_current_step(0.0))

    # --- checking what the policy issues ----------------------------------------------------------------------------

    def _take(self, actions: Sequence[Action], now_s: float = 0.0) -> list[Action]:
        """Checks actions and carries them out. Returns them with those that follow from a decision."""
        left = list(actions)
        for action in left:
            if isinstance(action, EndStep):
                self._take_end(action)
            elif isinstance(action, DecideCommit):
                left += self._take_decision(action, now_s)
            else:
                assert action.message.job == JOB
                self._take_one(action.to, action.message)
        self.pipeline.check_invariants()
        self._check_commit_is_whole()
        limits = self.shape.ordering
        for worker in self.shape.gpu_workers:
            assert len(self.computing_of(worker)) <= limits.max_prefetched + GRANTED_AHEAD
        assert len(self.flushing) <= limits.max_flushing
        # Every wait has a timeout: the instructions in flight here and the policy's pending replies are the same.
        num_outstanding = len(self.owed) + len(self.committing)
        num_outstanding += sum(len(flushes) for flushes in self.flushing.values()) + len(self.restoring)
        num_outstanding += len(self.loading) + bool(self.exporting)
        num_gradients = sum(map(self._completes_gradient, self.computing)) + self.num_unreported_grads
        assert len(self.pipeline.waits.outstanding) == num_outstanding + len(self.computing) + num_gradients
        assert self.pipeline.committed == self.committed
        self._check_skipped()
        self._check_prompt()
        self._check_told()
        if self.pipeline.finished:
            assert not self.choices()
        else:
            is_stuck = any(compute.op in self.stuck for compute in self.computing)
            assert is_stuck or self.choices(), "nothing is outstanding and the job is not finished: it is stuck"
        return left

    def _take_decision(self, decision: DecideCommit, now_s: float) -> list[Action]:
        """Does what the shell does: notes a decision durably, then lets the policy continue. Returns what follows."""
        assert self.pipeline.committed == self.committed, "a step counts as committed before that is durable"
        self.decide(int(decision.step))
        told, others = [], []
        for action in self.pipeline.commit_decided(decision.step, now_s):
            is_told = isinstance(action, Instruction) and isinstance(action.message, CommitDecided)
            (told if is_told else others).append(action)
        message = CommitDecided(job=JOB, step=decision.step)
        assert told == [Instruction(ssd, message) for ssd in self.shape.ssd_servers], "every SSD server is told once"
        return others

    def _take_one(self, to: ActorName, message: Message) -> None:
        match message:
            case LoadModel():
                assert to in {stage.optimizers[0] for stage in self.shape.stages} - self.loading
                assert not self.delivered
                self.loading.add(to)
            case ComputeBlocks():
                for operation in message.operations:
                    assert to == self.worker_of(operation.group, operation.block)
                    self._take_compute(operation)
            case CommitReached():
                assert message.step == self.committed
                self.offload(self.offload_orders[to].commit_reached(message.step))
            case UpdateStep():
                self._take_update(to, message)
            case SkipStep():
                assert message.step in self.skipped, "gradients are discarded of a step that is not skipped"
                assert self._gradients_complete(message.step)
                self.carry_out(to, self.update_queues[to].add(message))
            case FlushBlock():
                self._take_flush(to, message)
            case RestoreStates():
                self._take_restore(to, message)
            case CommitStore():
                self._take_commit(to, message)
            case ExportModel():
                self._take_export(to, message)
            case _:
                raise AssertionError(f"unexpected {message}")

    def _take_restore(self, to: ActorName, message: RestoreStates) -> None:
        assert to in {actor for block in self.resident for actor in holders(self.shape, block)}
        assert to not in self.restoring
        assert to not in self.restored
        assert message.step == self.committed
        assert not self.computed
        assert not self.computing
        self.restoring[to] = message

    def _take_flush(self, to: ActorName, message: FlushBlock) -> None:
        block, step = int(message.block), int(message.step)
        assert block in self.resident
        assert to in holders(self.shape, block)
        assert step == self.labels[block], "states are written under another step than their own"
        assert self.on_ssd[block] != self.content[block], "the SSDs have these states already"
        assert not any(updated == block for _, updated in self.updating), "a block is written while it changes"
        assert self.committed >= self.commit_before(step), "what a restart needs would be overwritten"
        flushes = self.flushing.setdefault(block, {})
        assert to not in flushes
        flushes[to] = message
        last = self._last_over()
        is_due = self.committed < last and self.is_commit_step(last)
        assert self.is_commit_step(step) or is_due, "flushed for no commit"

    def _take_commit(self, to: ActorName, message: CommitStore) -> None:
        step = message.step
        assert to not in self.committing
        assert self.is_commit_step(step)
        assert step == 0 or self.committed >= self.commit_before(step), "a commit overtook an earlier one"
        assert set(self.labels) == {message.states_step}
        assert set(self.content) == {self.last_good(step)}, "a step is committed before all of it is there"
        assert self.on_ssd == self.content, "a step is committed before all of it is on the SSDs"
        assert not self.flushing
        assert not self.updating
        assert (message.states_step < step) == (step in self.skipped)
        if step in self.skipped:
            assert self._gradients_complete(step)
            assert not self.computing, "params are renamed while they are read"
        assert not {key for key in self.kept if key[0] <= step}
        assert message.attempt == self.shape.attempt
        assert step in self.captured, "the shell adds the trainer's state, which it must have by now"
        self.committing[to] = message
        self.asked_commits.append(step)

    def _check_prompt(self) -> None:
        """Checks that resident blocks are flushed once a commit needs them, and trainer states are read in time."""
        due = {
            block
            for block in self.resident
            if self.on_ssd[block] != self.content[block] and self.is_commit_step(self.labels[block])
        }
        is_busy = len(self.flushing) == self.shape.ordering.max_flushing
        assert is_busy or due <= self.flushing.keys(), "a block waits for its flush"
        assert self.captured[-1] == self._last_decided()

    def _check_told(self) -> None:
        """Checks that steps are complete in order: with their commit or, where none is due, when they are over."""
        while self.last_complete < max(self.committed, 0) or (
            not self.is_commit_step(self.last_complete + 1)
            and self.committed >= self.commit_before(self.last_complete + 1)
            and min(self.written) > self.last_complete
        ):
            self.last_complete += 1
        self.complete_by_policy = max(self.complete_by_policy, self.pipeline.commits.last_complete_step)
        assert self.complete_by_policy == self.last_complete

    def _check_skipped(self) -> None:
        """Checks that a skipped step keeps no gradient slots and has no updates."""
        skipped = {step for step in self.skipped if self._gradients_complete(step)}
        assert not skipped & {step for step, *_ in self.kept}, "slots of a skipped step are kept"
        assert not skipped & {step for step, _ in self.updating}

    def _take_compute(self, message: ComputeBlock) -> None:
        assert self.committed >= 0
        self._check_restored()
        assert self.stopped_at is None or message.step <= self.stopped_at, "a step began after the job was stopped"
        found = (message.step, message.phase, message.block, message.group)
        worker = self.worker_of(message.group, message.block)
        assert found == self.expected_of(worker)[self.num_issued[worker]]
        self.num_issued[worker] += 1
        if message.step > self.begun:
            self._check_decided(before=message.step)
            self.begun = message.step
        assert message.loss_scale == (self.expected_loss_scale(message.step) if message.phase is Phase.HEAD else 1.0)
        assert message.blocks == self.shape.shared[message.block]
        evaluates = message.phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD)
        version = message.step if evaluates else message.step - 1
        if not self.shape.ordering.overlaps_steps:
            assert min(self.written) >= version, "a block is computed beside updates of the step before"
        for params in message.params:
            assert self.labels[params.block] == params.step, "params are read under another step than their own"
        for block in message.blocks:
            assert self.written[block] == version, "a block is computed with params of another step"
        assert all(message.op > other.op for other in self.computing_of(worker))
        assert message.op not in {other.op for other in self.computing}
        self.computing.append(message)

    def _check_decided(self, before: int) -> None:
        """Checks that all evaluations that can change what comes next are over, on all GPU workers."""
        if self.shape.evaluation_decides:
            evaluations = {each for each in self.expected if each[0] < before and each[1] in EVALUATION}
            assert evaluations <= set(self.computed), "a step begins before an evaluation has decided"

    def _check_restored(self) -> None:
        assert not self.restoring, "states are not in memory yet"
        assert set(self.restored) == {actor for block in self.resident for actor in holders(self.shape, block)}

    def _take_update(self, to: ActorName, message: UpdateStep) -> None:
        step = int(message.step)
        self._check_restored()
        assert to in self.shape.updating_actors
        assert self.committed >= self.commit_before(step), "what a restart needs would be overwritten"
        assert not self.flushing, "a block changes while it is written"
        assert set(self.labels) == {message.from_step}, "states are read under another step than their own"
        assert message.learning_rate == self.shape.learning_rate(step)
        assert message.grad_scale == pytest.approx(self.expected_grad_scale(step), rel=1e-12, abs=0.0)
        assert message.optimizer_step == self.expected_trainer(step)["optimizer_step"]
        if self.shape.keeps_grads:
            assert self._gradients_complete(step)
            assert step not in self.skipped
        assert self.how.setdefault(step, message) == message
        self.expect_updates(step)
        self.carry_out(to, self.update_queues[to].add(message))

    def check_update(self, step: int, block: int) -> None:
        """Checks that an update may begin, which an actor decides by itself."""
        reading = [compute for compute in self.computing if compute.op not in self.happened]
        assert not any(block in compute.blocks for compute in reading), "params change while they are read"
        added = {
            group for at, phase, each, group in self.computed if phase in WITH_GRADIENT and (at, each) == (step, block)
        } | {
            compute.group
            for compute in self.computing
            if compute.op in self.happened
            and compute.phase in WITH_GRADIENT
            and compute.step == step
            and compute.block == block
        }
        assert added >= set(range(self.shape.num_groups - 1)), "a group has yet to add its gradient"
        if not self.shape.ordering.overlaps_steps:
            assert all(compute.step == step for compute in reading), "a block is updated beside the next step"
            assert not (reading and self.shape.keeps_grads), "a block is updated beside the backward pass"

    def _take_export(self, to: ActorName, message: ExportModel) -> None:
        assert to == self.shape.optimizers[0]
        assert self.exporting is None
        self.exporting = message
        assert self.stopped_at is None
        is_final = message.step == self.final_step
        assert message.path == ("/models/out" if is_final else f"/models/out-step-{message.step}")
        for worker in self.shape.gpu_workers:
            assert (message.step, None, 0, 0) == self.expected_of(worker)[self.num_issued[worker]]
            self.num_issued[worker] += 1
        assert self.committed == message.step
        assert not self.computing
        self._check_restored()
        assert set(self.written) == set(self.labels) == {message.step}

    def _check_commit_is_whole(self) -> None:
        """Checks that commands of one answer are sent together: all shares of a flush, all servers of a commit."""
        for block, flushes in self.flushing.items():
            (step,) = {flush.step for flush in flushes.values()}
            if not any(isinstance(e, BlockFlushed) and (e.step, e.block) == (step, block) for e in self.delivered):
                assert flushes.keys() == holders(self.shape, block).keys()
        if self.committing and self.asked_commits:
            step = self.asked_commits[-1]
            assert self.asked_commits.count(step) == len(self.shape.ssd_servers)

    # --- the end ----------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Checks that everything was done once, in program order, and is committed.

        Bad gradients may have ended the job early; then nothing is checked.
        """
        if self.failed:
            return
        assert self.pipeline.finished
        assert not self.choices()
        assert not self.num_unreported_grads
        assert not self.kept
        assert not self.owed
        last = self.final_step if self.stopped_at is None else self.stopped_at
        assert self.committed == last
        assert set(self.written) == set(self.labels) == {last}
        assert set(self.on_ssd) == set(self.content) == {self.last_good(last)}
        for worker in self.shape.gpu_workers:
            self._check_end_of(worker, last)

    def _check_end_of(self, worker: ActorName, last: int) -> None:
        """Checks that a GPU worker has computed all its operations in order, and that it was there at all exports."""
        planned, num_issued = self.expected_of(worker), self.num_issued[worker]
        expected = planned[:num_issued]
        if self.stopped_at is None:
            assert num_issued == len(planned)
        else:
            trained = [o for o in planned if o[0] <= last and o[1] in TRAINING]
            assert [o for o in expected if o[1] in TRAINING] == trained
        computed = [o for o in self.computed if self.worker_of(o[3], o[2]) == worker]
        assert computed == [o for o in expected if o[1] is not None]
        exports = [o[0] for o in expected if o[1] is None]
        assert [step for step, _ in self.exports] == exports


def deliver_all_but(world: World, *kept: str) -> None:
    """Delivers all events except those that answer one of `kept`."""
    while choices := [c for c in world.choices() if not c.answers.startswith(kept)]:
        world.deliver(choices[0])


def sent(world: World, *kinds: type[Message]) -> list[Message]:
    """Runs the world to its end, and returns the messages of some types that the policy sends."""
    found: list[Message] = []
    while choices := world.choices():
        actions = world.deliver(choices[0])
        found += [o.message for o in actions if isinstance(o, Instruction) and isinstance(o.message, kinds)]
    return found
