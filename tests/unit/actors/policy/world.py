"""A world that carries out a policy's instructions in any order, and checks each one as it is issued.

It keeps its own account of what is true, such as what the SSDs hold, under which step it is read, and where gradients
lie, and never asks the policy.
"""

import copy
import json
import math
from dataclasses import dataclass, replace

import pytest

from tests.unit.actors.policy.jobs import (
    GPU,
    JOB,
    WITH_GRADIENT,
    Expected,
    expected_operations,
    grad_chunks,
    grad_sq_sum,
    holders,
    not_finite,
)
from windlass.actors.messages import (
    BlockBackwardDone,
    BlockComputed,
    BlockFlushed,
    BlockUpdated,
    CommitStore,
    ComputeBlock,
    ExportModel,
    FlushBlock,
    GradChunk,
    GradDropped,
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
from windlass.actors.policy.ordering import QueueOrder
from windlass.actors.policy.pipeline import NotFiniteError, Pipeline
from windlass.actors.policy.shape import JobShape
from windlass.actors.policy.trainer import Trainer
from windlass.actors.policy.waits import Instruction
from windlass.storage.ids import ActorName, BlockIndex, Step


@dataclass(frozen=True, slots=True)
class Pending:
    """An event that could happen now: what the actor would report."""

    event: Message
    answers: str  # key of the instruction that it answers; some instructions are answered by two events


class World(Expected):
    """Holds a policy's outstanding instructions. `choices` may happen next; `deliver` makes one of them happen."""

    def __init__(
        self,
        shape: JobShape,
        initial_step: int | None = None,
        *,
        bad: frozenset[tuple[int, int]] = frozenset(),
        scales_loss: bool = False,
    ) -> None:
        super().__init__(shape, bad, scales_loss)
        trainer = Trainer(scales_loss=scales_loss)
        trainer.restore(self.expected_trainer(initial_step or 0))
        self.pipeline = Pipeline(self._with_state(), trainer, None if initial_step is None else Step(initial_step))
        first_step = (initial_step or 0) + 1
        self.expected = expected_operations(shape, first_step)
        self.computing: list[ComputeBlock] = []  # in the order they came: so they are computed
        self.backward_told = False  # of the first one in `computing`
        self.offloading: dict[tuple[int, int], OffloadGrad] = {}
        self.updating: dict[tuple[int, int], dict[ActorName, UpdateBlock]] = {}
        self.flushing: dict[int, dict[ActorName, FlushBlock]] = {}
        self.committing: dict[ActorName, CommitStore] = {}
        self.restoring: dict[ActorName, RestoreStates] = {}
        self.restored: list[ActorName] = []
        self.loading = False
        self.exporting: ExportModel | None = None
        self.num_issued = 0  # operations
        self.computed: list[tuple[int, Phase, int, int]] = []
        self.prefetched: set[tuple[int, Phase, int, int, int]] = set()  # (op, what it does, block, group, version)
        first = -1 if initial_step is None else initial_step
        # Of each block: the step whose params an operation finds; the step under which its states are read; the step
        # whose update made them what they are, in memory or on the SSDs, and on the SSDs.
        self.written = [first] * shape.num_blocks
        self.labels = [first] * shape.num_blocks
        self.content = [self.last_good(first)] * shape.num_blocks
        self.on_ssd = [self.last_good(first)] * shape.num_blocks
        self.backward_done: set[tuple[int, int]] = set()
        self.offloaded: dict[tuple[int, int], tuple[GradChunk, ...]] = {}
        self.lent: set[tuple[int, int]] = set()  # whose gradients are neither an optimizer's nor dropped
        # What waits for its offload or its update, in order of arrival.
        self.to_offload: list[tuple[int, int]] = []
        self.to_update: list[tuple[int, int]] = []
        self.asked_commits: list[int] = []
        self.committed = first
        self.captured = [
            self.last_good(first)
        ]  # steps whose trainer's state was asked for; at first nothing is decided
        self.told = self.told_by_policy = max(first, 0)  # last step that is settled
        self.exports: list[tuple[int, str]] = []
        self.delivered: list[Message] = []
        self.stopped_at: int | None = None  # the last step of which anything was granted when the job was stopped
        self.begun = max(self.committed, 0)
        self.failed = False  # gradients were bad and could not be skipped

    def fork(self) -> "World":
        """An independent copy; needs a policy whose program can be copied."""
        shared = (self.shape, self.pipeline.shape, self.expected, self.bad, self.skipped)
        twin = copy.deepcopy(self, {id(each): each for each in shared})
        twin.pipeline.shape = twin._with_state()
        return twin

    def _with_state(self) -> JobShape:
        """The shape, with commits that keep what the trainer is when the state is asked for."""
        return replace(self.shape, trainer_state=self._capture)

    def _capture(self, step: int) -> str:
        """Must be asked for once a step, when it is known what became of it, and before that changes for the next."""
        assert step not in self.captured
        self.captured.append(step)
        assert step == self._last_decided()
        assert not any(compute.step > step and compute.phase is Phase.HEAD for compute in self.computing)
        return json.dumps({"step": step, **self.pipeline.trainer.to_json()})

    def _last_decided(self) -> int:
        """The last step that has been updated everywhere, or of which it is known that it is skipped."""
        return max([min(self.content), *(step for step in self.skipped if self._gradients_complete(step))])

    # --- which steps are committed ----------------------------------------------------------------------------------

    def is_commit_step(self, step: int) -> bool:
        """As the contract tells it; where nothing is kept, each step counts as committed once it is over."""
        if not self.shape.ssd_servers:
            return True
        every = [each for each in (self.shape.commit_every, self.shape.checkpoint_every) if each]
        return step in (self.shape.total_steps, self.stopped_at) or 0 in {step % each for each in every}

    def commit_before(self, step: int) -> int:
        """The last step before this one that must be safe before it changes anything."""
        return max(each for each in range(step) if self.is_commit_step(each))

    # --- what bad gradients lead to ---------------------------------------------------------------------------------

    def _expected_failure(self, event: Message) -> str | None:
        """What the policy must say where it cannot go on after an event that has just happened."""
        if not isinstance(event, BlockBackwardDone):
            return None
        if not self.shape.keeps_grads:
            is_bad = (event.step, event.block) in self.bad
            text = (
                f"a gradient of step {event.step} is not finite.*; step {self.committed} is the last that was committed"
            )
            return text if is_bad else None
        num = self.num_skipped_in_a_row(event.step)
        if not self._gradients_complete(event.step) or num <= self.shape.max_bad_steps:
            return None
        return f"gradients of {num} steps in a row, up to step {event.step}, were not finite"

    # --- what may happen next ---------------------------------------------------------------------------------------

    def choices(self) -> list[Pending]:
        """Every event that could come next. Operations run in the order they came; all else in any order."""
        found: list[Pending] = []
        if self.failed:
            return found
        if self.loading:
            found.append(Pending(ModelLoaded(job=JOB, step=Step(0)), "load"))
        if self.computing:
            found.append(self._next_of_compute(self.computing[0]))
        for (step, block), _ in self.offloading.items():
            event = GradOffloaded(
                job=JOB, step=Step(step), block=BlockIndex(block), chunks=grad_chunks(self.shape, block)
            )
            found.append(Pending(event, f"offload {step} {block}"))
        for (step, block), shares in self.updating.items():
            for actor in shares:
                updated = BlockUpdated(job=JOB, step=Step(step), block=BlockIndex(block), actor=actor)
                found.append(Pending(updated, f"update {step} {block} {actor}"))
        for block, flushes in self.flushing.items():
            for actor, flush in flushes.items():
                flushed = BlockFlushed(job=JOB, step=flush.step, block=flush.block, actor=actor)
                found.append(Pending(flushed, f"flush {flush.step} {block} {actor}"))
        for actor, restore in self.restoring.items():
            restored = StatesRestored(job=JOB, step=restore.step, actor=actor)
            found.append(Pending(restored, f"restore {restore.step} {actor}"))
        for actor, commit in self.committing.items():
            committed = StoreCommitted(job=JOB, step=commit.step, actor=actor, bytes_read=1, bytes_written=1)
            found.append(Pending(committed, f"commit {commit.step} {actor}"))
        if self.exporting is not None:
            exported = ModelExported(job=JOB, step=self.exporting.step, path=self.exporting.path)
            found.append(Pending(exported, f"export {self.exporting.step}"))
        return found

    def _completes_gradient(self, compute: ComputeBlock) -> bool:
        """Before the last group a gradient is a part of a sum, and nobody else's."""
        return compute.phase in WITH_GRADIENT and compute.group == self.shape.num_groups - 1

    def _next_of_compute(self, compute: ComputeBlock) -> Pending:
        if self._completes_gradient(compute) and not self.backward_told:
            key = (int(compute.step), int(compute.block))
            size = grad_sq_sum(*key) * self.expected_loss_scale(compute.step) ** 2
            if key in self.bad:
                size = not_finite(*key)
            done = BlockBackwardDone(job=JOB, step=compute.step, block=compute.block, grad_sq_sum=size)
            return Pending(done, f"gradient {compute.step} {compute.block}")
        computed = BlockComputed(
            job=JOB,
            step=compute.step,
            op=compute.op,
            phase=compute.phase,
            block=compute.block,
            compute_s=0.1,
            is_finite=True,
        )
        return Pending(computed, f"compute {compute.op}")

    # --- making it happen -------------------------------------------------------------------------------------------

    def start(self, now_s: float = 0.0) -> None:
        self._take(self.pipeline.start(now_s))

    def deliver(self, pending: Pending, now_s: float = 0.0) -> list[Instruction]:
        """Lets an event happen, and checks what the policy makes of it."""
        event = pending.event
        self._account(event)
        self.delivered.append(event)
        if (text := self._expected_failure(event)) is not None:
            with pytest.raises(NotFiniteError, match=text):
                self.pipeline.handle(event, now_s)
            self.failed = True
            return []
        instructions = self.pipeline.handle(event, now_s)
        self._take(instructions)
        return instructions

    def stop(self) -> None:
        if self.stopped_at is None:
            self.stopped_at = self.begun
        self._take(self.pipeline.stop_after_current_step(0.0))

    def _account(self, event: Message) -> None:
        """What is true once the event has happened."""
        match event:
            case ModelLoaded():
                self.loading = False
                self._relabel(0)
                self.content, self.on_ssd = list(self.written), list(self.written)
                self._settle_without_ssds()
            case StatesRestored():
                del self.restoring[event.actor]
                self.restored.append(event.actor)
            case BlockBackwardDone():
                self.backward_told = True
                self.backward_done.add((event.step, event.block))
                if event.block in self.shape.device_blocks:
                    self.offloaded[(event.step, event.block)] = ()
                    self.lent.add((event.step, event.block))
                else:
                    self.to_offload.append((event.step, event.block))
                self._note_gradient(event.step)
            case BlockComputed():
                compute = self.computing.pop(0)
                self.backward_told = False
                self.computed.append((compute.step, compute.phase, compute.block, compute.group))
            case GradOffloaded():
                key = (int(event.step), int(event.block))
                del self.offloading[key]
                self.offloaded[key] = event.chunks
                self.lent.add(key)
                self._note_gradient(event.step)
            case BlockUpdated():
                shares = self.updating[(event.step, event.block)]
                del shares[event.actor]
                if not shares:
                    del self.updating[(event.step, event.block)]
                    self.written[event.block] = self.labels[event.block] = self.content[event.block] = event.step
                    if event.block not in self.resident:
                        self.on_ssd[event.block] = event.step
                    self._settle_without_ssds()
            case BlockFlushed():
                flushes = self.flushing[event.block]
                del flushes[event.actor]
                if not flushes:
                    del self.flushing[event.block]
                    self.on_ssd[event.block] = self.content[event.block]
            case StoreCommitted():
                del self.committing[event.actor]
                if not self.committing:
                    self.committed = event.step
                    if event.step in self.skipped:
                        self._relabel(event.step)
            case ModelExported():
                self.exporting = None
                self.exports.append((event.step, event.path))

    @property
    def resident(self) -> frozenset[int]:
        """Blocks whose states the SSDs get when they are flushed."""
        return frozenset() if not self.shape.ssd_servers else self.shape.host_blocks | self.shape.device_blocks

    def _relabel(self, step: int) -> None:
        """All blocks are read under this step from now on, whatever has made them what they are."""
        self.written, self.labels = [step] * self.shape.num_blocks, [step] * self.shape.num_blocks

    def _note_gradient(self, step: int) -> None:
        """What is where it is kept may be updated; of a step that is skipped nothing is, and so it is over."""
        if self.shape.keeps_grads and not self._gradients_complete(step):
            return
        if step not in self.skipped:
            ready = [key for key in self.offloaded if key[0] == step and key in self.lent]
            self.to_update += [key for key in ready if key not in self.to_update]
        elif self._gradients_at_rest(step) and not self.is_commit_step(step):
            self.written = [step] * self.shape.num_blocks

        self._settle_without_ssds()

    def _settle_without_ssds(self) -> None:
        if not self.shape.ssd_servers and self._last_over() > self.committed:
            self.committed = self._last_over()
            if self.committed in self.skipped:
                self._relabel(self.committed)

    def _gradients_at_rest(self, step: int) -> bool:
        return sum(s == step for s, _ in self.offloaded) == self.shape.num_blocks

    def _gradients_complete(self, step: int) -> bool:
        return sum(s == step for s, _ in self.backward_done) == self.shape.num_blocks

    def arrivals(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """In which order what waits has come, where that decides anything."""
        if self.shape.ordering.queues is QueueOrder.PRIORITY:
            return ()
        lent = tuple(key for key in self.offloaded if key in self.lent)
        return (tuple(self.to_offload), lent)

    # --- checking what the policy issues ----------------------------------------------------------------------------

    def _take(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            assert instruction.message.job == JOB
            self._take_one(instruction.to, instruction.message)
        self._check_commit_is_whole()
        limits = self.shape.ordering
        assert len(self.computing) <= limits.max_prefetched
        assert len(self.offloading) <= limits.max_offloading
        assert len(self.flushing) <= limits.max_flushing
        on_device = sum(block in self.shape.device_blocks for _, block in self.updating)
        assert on_device <= limits.max_updating_on_device
        assert len(self.updating) - on_device <= limits.max_updating
        # Every wait has a deadline: what is outstanding here and what the policy waits for are the same.
        num_outstanding = sum(len(shares) for shares in self.updating.values()) + len(self.committing)
        num_outstanding += sum(len(flushes) for flushes in self.flushing.values()) + len(self.restoring)
        num_outstanding += len(self.offloading) + self.loading + (self.exporting is not None)
        num_gradients = sum(map(self._completes_gradient, self.computing)) - self.backward_told
        assert len(self.pipeline.waits.outstanding) == num_outstanding + len(self.computing) + num_gradients
        assert self.pipeline.committed == self.committed
        self._check_skipped()
        self._check_ends()
        self._check_prompt()
        self._check_told()
        if self.pipeline.finished:
            assert not self.choices()
        else:
            assert self.choices(), "nothing is outstanding and the job is not finished: it is stuck"

    def _take_one(self, to: ActorName, message: Message) -> None:
        match message:
            case LoadModel():
                assert to == self.shape.optimizers[0]
                assert not self.delivered
                self.loading = True
            case PrefetchParams():
                assert to == GPU
                assert self.labels[message.block] == message.step, "params are read under another step than their own"
                version = self.written[message.block]
                self.prefetched.add((message.op, message.phase, message.block, message.group, version))
            case ComputeBlock():
                self._take_compute(to, message)
            case OffloadGrad():
                key = (int(message.step), int(message.block))
                assert to == GPU
                assert key == self._first_of(self.to_offload), "a block is offloaded before its turn"
                is_safe = self.committed >= message.step - 1
                assert is_safe or message.block not in self.shape.spilled_blocks, (
                    "a gradient overwrites what is not safe"
                )
                self.to_offload.remove(key)
                self.offloading[key] = message
            case UpdateBlock():
                self._take_update(to, message)
            case FlushBlock():
                self._take_flush(to, message)
            case RestoreStates():
                self._take_restore(to, message)
            case GradDropped():
                self._take_drop(to, message)
            case CommitStore():
                self._take_commit(to, message)
            case ExportModel():
                self._take_export(to, message)
            case _:
                raise AssertionError(f"nobody expects {message}")

    def _take_drop(self, to: ActorName, message: GradDropped) -> None:
        key = (int(message.step), int(message.block))
        assert to == GPU
        assert message.step in self.skipped, "an optimizer returns the slots of a step that is not skipped"
        assert self._gradients_complete(message.step)
        assert message.chunks == self.offloaded[key]
        self.lent.remove(key)  # each block once

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

    def _last_over(self) -> int:
        """The last step that is updated, or of which, as it is skipped, nothing is on its way."""
        over = [step for step in self.skipped if self._gradients_complete(step) and self._gradients_at_rest(step)]
        return max([min(self.content), *over])

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
            assert self._gradients_at_rest(step)
            assert not self.computing, "params are renamed while they are read"
        assert not {key for key in self.lent if key[0] <= step}
        assert message.attempt == self.shape.attempt
        assert json.loads(message.trainer_state) == {"step": step, **self.expected_trainer(step)}
        self.committing[to] = message
        self.asked_commits.append(step)

    def _check_prompt(self) -> None:
        """Resident blocks are flushed as soon as a commit will need it, and trainer states are kept in time."""
        due = {
            block
            for block in self.resident
            if self.on_ssd[block] != self.content[block] and self.is_commit_step(self.labels[block])
        }
        is_busy = len(self.flushing) == self.shape.ordering.max_flushing
        assert is_busy or due <= self.flushing.keys(), "a block waits for its flush"
        assert self.captured[-1] == self._last_decided()

    def _check_told(self) -> None:
        """Steps are settled in order: with their commit or, where none is due, when they are over."""
        while self.told < max(self.committed, 0) or (
            not self.is_commit_step(self.told + 1)
            and self.committed >= self.commit_before(self.told + 1)
            and min(self.written) > self.told
        ):
            self.told += 1
        self.told_by_policy = max(self.told_by_policy, self.pipeline.commits.settled)
        assert self.told_by_policy == self.told

    def _check_skipped(self) -> None:
        """No slot of a skipped step stays where it is; nothing of it is updated."""
        skipped = {step for step in self.skipped if self._gradients_complete(step)}
        assert not skipped & {step for step, _ in self.lent}, "slots of a skipped step are kept"
        assert not skipped & {step for step, _ in self.updating}

    def _check_ends(self) -> None:
        """What a step turned out to be is told once all its gradients are known."""
        begun = {step for step, _ in self.backward_done}
        assert self.pipeline.ends.keys() == {step for step in begun if self._gradients_complete(step)}
        for step, end in self.pipeline.ends.items():
            norm = math.nan if step in self.skipped else self.grad_norm(step)
            assert end.grad_norm == pytest.approx(norm, rel=1e-12, abs=0.0, nan_ok=True)
            assert end.loss_scale == self.expected_loss_scale(step)
            assert end.num_skipped == sum(each <= step for each in self.skipped)

    def _take_compute(self, to: ActorName, message: ComputeBlock) -> None:
        assert to == GPU
        assert self.committed >= 0
        self._check_restored()
        assert self.stopped_at is None or message.step <= self.stopped_at, "a step began after the job was stopped"
        found = (message.step, message.phase, message.block, message.group)
        assert found == self.expected[self.num_issued]
        self.num_issued += 1
        self.begun = max(self.begun, message.step)
        assert message.loss_scale == (self.expected_loss_scale(message.step) if message.phase is Phase.HEAD else 1.0)
        assert message.blocks == self.shape.shared[message.block]
        evaluates = message.phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD)
        version = message.step if evaluates else message.step - 1
        if not self.shape.ordering.overlaps_steps:
            assert min(self.written) >= version, "a block is computed beside updates of the step before"
        for block in message.blocks:
            assert self.written[block] == version, "a block is computed with params of another step"
            assert (message.op, message.phase, block, message.group, version) in self.prefetched
        assert all(message.op > other.op for other in self.computing)
        self.computing.append(message)

    def _check_restored(self) -> None:
        assert not self.restoring, "states are not in memory yet"
        assert set(self.restored) == {actor for block in self.resident for actor in holders(self.shape, block)}

    def _take_update(self, to: ActorName, message: UpdateBlock) -> None:
        key = (int(message.step), int(message.block))
        self._check_restored()
        assert self.committed >= self.commit_before(message.step), "what a restart needs would be overwritten"
        assert message.block not in self.flushing, "a block changes while it is written"
        assert message.from_step == self.labels[message.block], "states are read under another step than their own"
        reading = self.computing[self.backward_told :]
        assert not any(message.block in compute.blocks for compute in reading), "params change while they are read"
        added = {
            group for step, phase, block, group in self.computed if phase in WITH_GRADIENT and (step, block) == key
        }
        assert added >= set(range(self.shape.num_groups - 1)), "a group has yet to add its gradient"
        assert message.learning_rate == self.shape.learning_rate(message.step)
        assert message.grad_scale == pytest.approx(self.expected_grad_scale(message.step), rel=1e-12, abs=0.0)
        assert message.optimizer_step == self.expected_trainer(message.step)["optimizer_step"]
        if self.shape.keeps_grads:
            assert self._gradients_complete(message.step)
            assert message.step not in self.skipped
        if not self.shape.ordering.overlaps_steps:
            assert all(compute.step == message.step for compute in reading), "a block is updated beside the next step"
            assert not (reading and self.shape.keeps_grads), "a block is updated beside the backward pass"
        if key not in self.updating:
            is_device = message.block in self.shape.device_blocks
            rivals = [each for each in self.to_update if (each[1] in self.shape.device_blocks) == is_device]
            assert key == self._first_of(rivals), "a block is updated before its turn"
            self.to_update.remove(key)
            self.lent.remove(key)
            self.updating[key] = {}
        shares = self.updating[key]
        assert to not in shares
        shares[to] = message
        assert tuple(chunk.key for chunk in message.chunks) == holders(self.shape, message.block)[to]
        assert set(message.chunks) <= set(self.offloaded[key])

    def _first_of(self, waiting: list[tuple[int, int]]) -> tuple[int, int]:
        """Whose turn it is."""
        return min(waiting) if self.shape.ordering.queues is QueueOrder.PRIORITY else waiting[0]

    def _take_export(self, to: ActorName, message: ExportModel) -> None:
        assert to == self.shape.optimizers[0]
        assert self.stopped_at is None
        assert (message.step, None, 0, 0) == self.expected[self.num_issued]
        self.num_issued += 1
        assert self.committed == message.step
        assert not self.computing
        self._check_restored()
        assert set(self.written) == set(self.labels) == {message.step}
        self.exporting = message

    def _check_commit_is_whole(self) -> None:
        """Commands of one answer go out together: every share of an update, every server of a commit."""
        for (step, block), shares in self.updating.items():
            if not any(isinstance(e, BlockUpdated) and (e.step, e.block) == (step, block) for e in self.delivered):
                assert shares.keys() == holders(self.shape, block).keys()
        for block, flushes in self.flushing.items():
            (step,) = {flush.step for flush in flushes.values()}
            if not any(isinstance(e, BlockFlushed) and (e.step, e.block) == (step, block) for e in self.delivered):
                assert flushes.keys() == holders(self.shape, block).keys()
        if self.committing and self.asked_commits:
            step = self.asked_commits[-1]
            assert self.asked_commits.count(step) == len(self.shape.ssd_servers)

    # --- the end ----------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Everything was done, once, in program order, and is committed; unless bad gradients ended it before."""
        if self.failed:
            return
        assert self.pipeline.finished
        assert not self.choices()
        assert not self.to_offload
        assert not self.to_update
        assert not self.lent
        last = self.shape.total_steps if self.stopped_at is None else self.stopped_at
        assert self.committed == last
        assert set(self.written) == set(self.labels) == {last}
        assert set(self.on_ssd) == set(self.content) == {self.last_good(last)}
        expected = self.expected[: self.num_issued]
        if self.stopped_at is None:
            assert self.num_issued == len(self.expected)
        else:
            trained = [o for o in self.expected if o[0] <= last and o[1] in (Phase.FORWARD, *WITH_GRADIENT)]
            assert [o for o in expected if o[1] in (Phase.FORWARD, *WITH_GRADIENT)] == trained
        assert self.computed == [o for o in expected if o[1] is not None]
        exports = [o[0] for o in expected if o[1] is None]
        assert self.exports == [(step, self.shape.path_of_export(step)) for step in exports]


def deliver_all_but(world: World, *kept: str) -> None:
    """Lets everything happen except what answers one of `kept`."""
    while choices := [c for c in world.choices() if not c.answers.startswith(kept)]:
        world.deliver(choices[0])


def sent(world: World, *kinds: type[Message]) -> list[Message]:
    """What the policy sends from now on, of some kinds, until nothing is left."""
    found: list[Message] = []
    while choices := world.choices():
        found += [i.message for i in world.deliver(choices[0]) if isinstance(i.message, kinds)]
    return found
