"""The state of the world while a policy's instructions are carried out, and the events that may come next.

It is derived only from events: such as the content of the SSDs, the step under which it is read, and the place of each
gradient.
"""

from dataclasses import dataclass

from tests.support.policy.jobs import (
    JOB,
    WITH_GRADIENT,
    Expected,
    expected_operations,
    grad_chunks,
    grad_sq_sum,
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
    GradOffloaded,
    Message,
    ModelExported,
    ModelLoaded,
    OffloadGrad,
    Phase,
    RestoreStates,
    StatesRestored,
    StoreCommitted,
    UpdateBlock,
)
from windlass.actors.policy.block_queue import QueueOrder
from windlass.actors.policy.config import SchedulerConfig
from windlass.storage.ids import ActorName, BlockIndex, Step


@dataclass(frozen=True, slots=True)
class Pending:
    """An event that can come now: the report of an actor."""

    event: Message
    answers: str  # key of the instruction that it answers; some instructions are answered by two events


class Facts(Expected):
    """The instructions in flight and their results so far. `choices` lists the events that can come next."""

    def __init__(
        self,
        shape: SchedulerConfig,
        initial_step: int | None = None,
        *,
        bad: frozenset[tuple[int, int]] = frozenset(),
        scales_loss: bool = False,
    ) -> None:
        super().__init__(shape, bad, scales_loss)
        first_step = (initial_step or 0) + 1
        self.expected = expected_operations(shape, first_step)
        self.computing: list[ComputeBlock] = []  # in order of arrival, which is the order of computation
        self.backward_told = False  # for the first entry of `computing`
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
        self.prefetched: set[tuple[int, Phase, int, int, int]] = set()  # (op, phase, block, group, version)
        first = -1 if initial_step is None else initial_step
        # For each block: the step whose params an operation finds; the step under which its states are read; the step
        # whose update made its states, in memory or on SSD; and the same on SSD only.
        self.written = [first] * shape.num_blocks
        self.labels = [first] * shape.num_blocks
        self.content = [self.last_good(first)] * shape.num_blocks
        self.on_ssd = [self.last_good(first)] * shape.num_blocks
        self.backward_done: set[tuple[int, int]] = set()
        self.offloaded: dict[tuple[int, int], tuple[GradChunk, ...]] = {}
        self.lent: set[tuple[int, int]] = set()  # gradients that are neither an optimizer's nor discarded
        # Blocks that wait for their offload or their update, in order of arrival.
        self.to_offload: list[tuple[int, int]] = []
        self.to_update: list[tuple[int, int]] = []
        self.asked_commits: list[int] = []
        self.committed = first
        self.told = max(first, 0)  # last step that was reported as settled
        self.exports: list[tuple[int, str]] = []
        self.delivered: list[Message] = []
        self.stopped_at: int | None = None  # last step of which anything was granted when the job was stopped
        self.final_step = shape.total_steps  # lower if the job ends early
        self.begun = max(self.committed, 0)
        self.failed = False  # gradients were bad and could not be skipped

    def _last_decided(self) -> int:
        """The last step that is updated in every block, or known to be skipped."""
        return max([min(self.content), *(step for step in self.skipped if self._gradients_complete(step))])

    def _last_over(self) -> int:
        """The last step that is updated, or skipped with no gradient in flight."""
        over = [step for step in self.skipped if self._gradients_complete(step) and self._gradients_at_rest(step)]
        return max([min(self.content), *over])

    # --- which steps are committed ----------------------------------------------------------------------------------

    def is_commit_step(self, step: int) -> bool:
        """Returns whether a step is committed by the rules.

        Without SSDs, each step counts as committed once it is over.
        """
        if not self.shape.ssd_servers:
            return True
        return step == self.stopped_at or self.is_due_for_commit(step)

    def is_due_for_commit(self, step: int) -> bool:
        """Returns whether a step is committed regardless of where the job stops."""
        every = [self.shape.commit_every, self.shape.checkpoint_every]
        if self.shape.evaluation_decides and self.shape.num_evaluation_groups:
            every.append(self.shape.evaluate_every)
        return step == self.shape.total_steps or 0 in {step % each for each in every if each}

    def is_end_of_evaluation(self, event: Message) -> bool:
        """Returns whether this event, already accounted for, completes the evaluation of a step."""
        if not isinstance(event, BlockComputed) or event.phase is not Phase.EVALUATE_HEAD:
            return False
        return self.computed[-1][3] == self.shape.num_evaluation_groups - 1

    def expect_export(self, step: int) -> None:
        """Adds an export of this step, if the program has none, ahead of any operation of the next step."""
        if (step, None, 0, 0) not in self.expected:
            place = sum(each[0] <= step for each in self.expected)
            self.expected = [*self.expected[:place], (step, None, 0, 0), *self.expected[place:]]

    def expect_end(self, step: int) -> None:
        """Ends the job at this step, with an export of it."""
        self.final_step = step
        self.expected = [each for each in self.expected if each[0] <= step]
        self.expect_export(step)

    def commit_before(self, step: int) -> int:
        """The last earlier step that must be committed before `step` changes any state on the SSDs."""
        return max(each for each in range(step) if self.is_commit_step(each))

    # --- what may happen next ---------------------------------------------------------------------------------------

    def choices(self) -> list[Pending]:
        """Every event that can come next. Operations run in the order they came; all else in any order."""
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
        """Returns whether the block's gradient is complete.

        Before the last group it is a partial sum in the GPU worker.
        """
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

    # --- what has happened -------------------------------------------------------------------------------------------

    def account(self, event: Message) -> None:
        """Updates the state of the world after an event."""
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
        """Blocks whose states reach the SSDs when they are flushed."""
        return frozenset() if not self.shape.ssd_servers else self.shape.host_blocks | self.shape.device_blocks

    def _relabel(self, step: int) -> None:
        """All blocks are read under this step from now on, regardless of the step that made their states."""
        self.written, self.labels = [step] * self.shape.num_blocks, [step] * self.shape.num_blocks

    def _note_gradient(self, step: int) -> None:
        """Queues updates whose gradient is in place. A skipped step has no updates, so it is over."""
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
        """The order of arrival of waiting gradients, if the policy depends on it."""
        if self.shape.ordering.queues is QueueOrder.PRIORITY:
            return ()
        lent = tuple(key for key in self.offloaded if key in self.lent)
        return (tuple(self.to_offload), lent)

    def _first_of(self, waiting: list[tuple[int, int]]) -> tuple[int, int]:
        """The step and block that come first by the policy's queue order."""
        return min(waiting) if self.shape.ordering.queues is QueueOrder.PRIORITY else waiting[0]
