"""The state of the world while a policy's instructions are carried out, and the events that may come next.

It is derived only from events: such as the content of the SSDs, the step under which it is read, and the place of each
gradient.
"""

from dataclasses import dataclass

from tests.support.policy.jobs import (
    JOB,
    WITH_GRADIENT,
    Expected,
    computed,
    expected_operations,
    grad_ready,
    grad_sq_sum,
    holders,
    not_finite,
    stage_of,
)
from windlass.actors.messages import (
    BlockFlushed,
    BlockUpdated,
    CommitStore,
    ComputeBlock,
    ComputeProgressed,
    Event,
    ExportModel,
    FlushBlock,
    GradOffloaded,
    GradReady,
    Message,
    ModelExported,
    ModelLoaded,
    Phase,
    RestoreStates,
    StatesRestored,
    StoreCommitted,
    UpdateStep,
)
from windlass.actors.policy.config import SchedulerConfig
from windlass.actors.worker_policy.worker_queues import OffloadQueue, UpdateActions, UpdateQueue
from windlass.storage.ids import ActorName, BlockIndex, Step


@dataclass(frozen=True, slots=True)
class Pending:
    """An event that can come now: the report of an actor."""

    event: Event
    answers: str  # key of the instruction that it answers; some instructions are answered by two events


def _described(compute: ComputeBlock) -> tuple[int, Phase, int, int]:
    return (compute.step, compute.phase, compute.block, compute.group)


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
        # Operations whose end is not reported: in order of arrival, which is each GPU worker's order of computation.
        self.computing: list[ComputeBlock] = []
        # Those of them that must be over, because another GPU worker has reported what comes after them.
        self.happened: set[int] = set()
        self.stuck: set[int] = set()  # numbers of operations that never end, although a GPU worker has them
        # Gradients that are where they stay, and whose report is on its way; those that are reported are in `reported`.
        # The actors that update them may have begun.
        self.offload_orders = {
            self.grads_worker(stage.blocks.first): OffloadQueue(shape.ordering, shape.spilled_blocks)
            for stage in shape.stages
        }
        self.offloading: set[tuple[int, int]] = set()
        self.num_unreported_grads = 0
        self.reported: set[tuple[int, int]] = set()
        self.without_losses: list[GradReady] = []  # reports that do not count before those of all losses of the step
        self.update_queues = {actor: self._queue_of(actor) for actor in shape.updating_actors}
        self.how: dict[int, UpdateStep] = {}  # by step
        self.updating: dict[tuple[int, int], set[ActorName]] = {}  # updates that have begun
        self.updated: dict[tuple[int, int], set[ActorName]] = {}  # shares that are updated, until all of a block are
        self.owed: set[tuple[int, int, ActorName]] = set()  # updates that the policy waits for
        self.flushing: dict[int, dict[ActorName, FlushBlock]] = {}
        self.committing: dict[ActorName, CommitStore] = {}
        self.restoring: dict[ActorName, RestoreStates] = {}
        self.restored: list[ActorName] = []
        self.loading: set[ActorName] = set()
        self.exporting: ExportModel | None = None
        self.num_issued = dict.fromkeys(shape.gpu_workers, 0)  # operations of each GPU worker, and exports
        self.computed: list[tuple[int, Phase, int, int]] = []
        first = -1 if initial_step is None else initial_step
        # For each block: the step whose params an operation finds; the step under which its states are read; the step
        # whose update made its states, in memory or on SSD; and the same on SSD only.
        self.written = [first] * shape.num_blocks
        self.labels = [first] * shape.num_blocks
        self.content = [self.last_good(first)] * shape.num_blocks
        self.on_ssd = [self.last_good(first)] * shape.num_blocks
        self.kept: set[tuple[int, int, ActorName]] = set()  # gradients, by holder, that are neither used nor discarded
        self.undecided: int | None = None  # the step that all SSD servers have committed, before that is durable
        self.asked_commits: list[int] = []
        self.committed = first
        self.last_complete = max(first, 0)  # last step that was reported as complete
        self.exports: list[tuple[int, str]] = []
        self.delivered: list[Message] = []
        self.stopped_at: int | None = None  # last step of which anything was granted when the job was stopped
        self.final_step = shape.total_steps  # lower if the job ends early
        self.begun = max(self.committed, 0)
        self.failed = False  # gradients were bad and could not be skipped

    def _last_decided(self) -> int:
        """The last step that is updated in every block, or known to be skipped."""
        return max([min(self.content), *(step for step in self.skipped if self._gradients_complete(step))])

    def _queue_of(self, actor: ActorName) -> UpdateQueue:
        ordering, is_gpu = self.shape.ordering, actor in self.shape.gpu_workers
        limit = ordering.max_updating_on_device if is_gpu else ordering.max_updating
        blocks = [block for block in range(self.shape.num_blocks) if actor in holders(self.shape, block)]
        return UpdateQueue(ordering.queues, limit, len(blocks))

    def _last_over(self) -> int:
        """The last step that is updated, or skipped with no gradient in flight."""
        over = [step for step in self.skipped if self._gradients_complete(step)]
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
        if not isinstance(event, ComputeProgressed) or not event.computed:
            return False
        if event.computed[-1].phase is not Phase.EVALUATE_HEAD:
            return False
        heads = [each for each in self.computed if each[:2] == (event.step, Phase.EVALUATE_HEAD)]
        return len(heads) == self.shape.num_evaluation_groups

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
        """Every event that can come next.

        Operations of one GPU worker run in the order they came; all else in any order.
        """
        found: list[Pending] = []
        if self.failed:
            return found
        for actor in sorted(self.loading):
            found.append(Pending(ModelLoaded(job=JOB, step=Step(0), actor=actor), f"load {actor}"))
        found += [self._gradient(step, block) for step, block in sorted(self.offloading)]
        found += map(self._next_of_compute, self._can_be_reported())
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
        if (export := self.exporting) is not None:
            exported = ModelExported(job=JOB, step=export.step, actor=self.shape.optimizers[0], path=export.path)
            found.append(Pending(exported, f"export {export.step}"))
        return found

    def _completes_gradient(self, compute: ComputeBlock) -> bool:
        """Returns whether the block's gradient is complete.

        Before the last group it is a partial sum in the GPU worker.
        """
        return compute.phase in WITH_GRADIENT and compute.group == self.shape.num_groups - 1

    def computing_of(self, worker: ActorName) -> list[ComputeBlock]:
        """The operations of one GPU worker whose end is not reported, in order."""
        return [compute for compute in self.computing if self._worker_of(compute) == worker]

    def _worker_of(self, compute: ComputeBlock) -> ActorName:
        return self.worker_of(compute.group, compute.block)

    def expected_of(self, worker: ActorName) -> list[tuple[int, Phase | None, int, int]]:
        """The expected operations of one GPU worker, and all exports."""
        return [each for each in self.expected if each[1] is None or self.worker_of(each[3], each[2]) == worker]

    def _predecessors(self, compute: ComputeBlock) -> list[tuple[int, Phase, int, int]]:
        """The operations of other GPU workers whose results this one needs: a sum, or another box's hidden states.

        If embedding and head share params on different boxes, also the embedding's params, and the head's sum for them.
        """
        step, phase, block, group = _described(compute)
        found = []
        if phase in WITH_GRADIENT and group and len(stage_of(self.shape, block).gpu_workers) > 1:
            found.append((step, phase, block, group - 1))
        stage, head = stage_of(self.shape, block).blocks, self.shape.num_blocks - 1
        if phase is Phase.BACKWARD and block == stage.stop - 1:
            found.append((step, Phase.HEAD if block + 1 == head else Phase.BACKWARD, block + 1, group))
        if phase is not Phase.BACKWARD and block == stage.first > 0:
            before = Phase.EVALUATE if phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD) else Phase.FORWARD
            found.append((step, before, block - 1, group))
        if len(self.shape.stages) > 1 and len(self.shape.shared[head]) > 1:
            if block == head:  # the first one that needs these params, or the next one with them
                found.append((step, Phase.FORWARD if phase is Phase.HEAD else Phase.EVALUATE, 0, 0))
            if phase is Phase.BACKWARD and block == 0 and group == self.shape.num_groups - 1:
                found.append((step, Phase.HEAD, head, group))
        return found

    def _can_be_reported(self) -> list[ComputeBlock]:
        """The first operations of GPU workers, if they can be over.

        Each GPU worker may have computed all that it was granted, up to an operation that needs another one's sum.
        Reports of several GPU workers overtake each other.
        """
        over = set(self.computed)
        left = {worker: self.computing_of(worker) for worker in self.shape.gpu_workers}
        first = [computing[0] for computing in left.values() if computing]
        num_over = -1
        while num_over < len(over):
            num_over = len(over)
            for computing in left.values():
                while computing and self._can_end(computing[0], over):
                    over.add(_described(computing.pop(0)))
        return [compute for compute in first if _described(compute) in over]

    def _can_end(self, compute: ComputeBlock, over: set[tuple[int, Phase, int, int]]) -> bool:
        return compute.op not in self.stuck and over.issuperset(self._predecessors(compute))

    def _happen(self, compute: ComputeBlock) -> None:
        """Records that an operation is over, and with it all that comes before it."""
        for each in self.computing_of(self._worker_of(compute)):
            if each.op > compute.op:
                break
            if each.op in self.happened:
                continue
            self.happened.add(each.op)
            before = self._predecessors(each)
            for other in self.computing:
                if _described(other) in before:
                    self._happen(other)

    def _next_of_compute(self, compute: ComputeBlock) -> Pending:
        return Pending(computed(compute, self._worker_of(compute)), f"compute {compute.op}")

    def _gradient(self, step: int, block: int) -> Pending:
        size = grad_sq_sum(step, block) * self.expected_loss_scale(step) ** 2
        if (step, block) in self.bad:
            size = not_finite(step, block)
        return Pending(grad_ready(step, block, size, actor=self.grads_worker(block)), f"gradient {step} {block}")

    # --- what has happened -------------------------------------------------------------------------------------------

    def account(self, event: Message) -> None:
        """Updates the state of the world after an event."""
        match event:
            case ModelLoaded():
                self.loading.remove(event.actor)
                if self.loading:
                    return
                self._relabel(0)
                self.content, self.on_ssd = list(self.written), list(self.written)
                self._complete_without_ssds()
            case StatesRestored():
                del self.restoring[event.actor]
                self.restored.append(event.actor)
            case ComputeProgressed():
                for _ in event.computed:
                    first = self.computing_of(event.actor)[0]
                    self._happen(first)
                    self.computing.remove(first)
                    self.happened.remove(first.op)
                    self._note_computed(first)
                early, self.without_losses = self.without_losses, []
                for grad in early:
                    self._count_gradient(grad)
                for grad in event.grads:
                    self._note_gradient(grad)
            case BlockUpdated():
                key = (int(event.step), int(event.block))
                self.updating[key].remove(event.actor)
                if not self.updating[key]:
                    del self.updating[key]
                self.owed.discard((*key, event.actor))
                self.updated.setdefault(key, set()).add(event.actor)
                self._note_updated(key)
                self.carry_out(event.actor, self.update_queues[event.actor].updated(event.step))
            case BlockFlushed():
                flushes = self.flushing[event.block]
                del flushes[event.actor]
                if not flushes:
                    del self.flushing[event.block]
                    self.on_ssd[event.block] = self.content[event.block]
            case StoreCommitted():
                del self.committing[event.actor]
                if not self.committing:
                    self.undecided = event.step
            case ModelExported():
                self.exporting = None
                self.exports.append((event.step, event.path))

    def decide(self, step: int) -> None:
        """Notes durably that all SSD servers have committed a step."""
        assert step == self.undecided, "a step is decided before all SSD servers have committed it"
        self.undecided = None
        self.committed = step
        if step in self.skipped:
            self._relabel(step)

    @property
    def resident(self) -> frozenset[int]:
        """Blocks whose states reach the SSDs when they are flushed."""
        return frozenset() if not self.shape.ssd_servers else self.shape.host_blocks | self.shape.device_blocks

    def _relabel(self, step: int) -> None:
        """All blocks are read under this step from now on, regardless of the step that made their states."""
        self.written, self.labels = [step] * self.shape.num_blocks, [step] * self.shape.num_blocks

    def _note_computed(self, compute: ComputeBlock) -> None:
        """Lets a complete gradient leave the device, in the GPU worker's order."""
        self.computed.append(_described(compute))
        if self._completes_gradient(compute):
            self.num_unreported_grads += 1
            if compute.block in self.shape.device_blocks:
                self._store(compute.step, compute.block)
            else:
                self.offload(self.offload_orders[self._worker_of(compute)].push(compute.step, compute.block))

    def offload(self, keys: list[tuple[Step, BlockIndex]]) -> None:
        """Lets gradients leave the device. Their holders have them at once, the policy learns of them later."""
        for step, block in keys:
            is_safe = self.committed >= step - 1
            assert is_safe or block not in self.shape.spilled_blocks, "a gradient overwrites what is not safe"
            self._store(step, block)

    def _store(self, step: int, block: int) -> None:
        self.offloading.add((step, block))
        for actor in holders(self.shape, block):
            self.kept.add((step, block, actor))
            grad = GradOffloaded(job=JOB, step=Step(step), block=BlockIndex(block), chunks=())
            self.carry_out(actor, self.update_queues[actor].add(grad))

    def carry_out(self, actor: ActorName, actions: UpdateActions) -> None:
        """Begins an actor's updates, and discards its gradients."""
        for update in actions.begin:
            key = (int(update.step), int(update.block))
            assert update.how == self.how[update.step]
            self.kept.remove((*key, actor))
            self.updating.setdefault(key, set()).add(actor)
            self.check_update(*key)
        for grad in actions.discard:
            assert grad.step in self.skipped
            self.kept.remove((grad.step, grad.block, actor))

    def check_update(self, step: int, block: int) -> None:
        """Checks that an update may begin."""
        raise NotImplementedError

    def _note_updated(self, key: tuple[int, int]) -> None:
        """Makes a block's update count, once all shares and the gradient are reported."""
        step, block = key
        if key not in self.reported or self.updated.get(key) != holders(self.shape, block).keys():
            return
        del self.updated[key]
        self.written[block] = self.labels[block] = self.content[block] = step
        if block not in self.resident:
            self.on_ssd[block] = step
        self._complete_without_ssds()

    def _note_gradient(self, grad: GradReady) -> None:
        """Records the report of a gradient."""
        self.offloading.remove((int(grad.step), int(grad.block)))
        self.num_unreported_grads -= 1
        self._count_gradient(grad)
        if grad.block not in self.shape.device_blocks:
            self.offload(self.offload_orders[self.grads_worker(grad.block)].offload_finished())

    def _count_gradient(self, grad: GradReady) -> None:
        """Lets a gradient count, once all losses are known. A skipped step has no updates, so it is over."""
        step, key = grad.step, (int(grad.step), int(grad.block))
        heads = [each for each in self.computed if each[:2] == (step, Phase.HEAD)]
        if grad.block == self.shape.num_blocks - 1 and len(heads) < self.shape.num_groups:
            self.without_losses.append(grad)
            return
        self.reported.add(key)
        self.expect_updates(int(step))
        self._note_updated(key)
        if self.shape.keeps_grads and self._gradients_complete(step):
            if step in self.skipped and not self.is_commit_step(step):
                self.written = [step] * self.shape.num_blocks
            self._complete_without_ssds()

    def expect_updates(self, step: int) -> None:
        """Adds what the policy waits for: updates that the actors may begin and whose gradient is reported."""
        if step not in self.how:
            return
        for block in range(self.shape.num_blocks):
            if (step, block) in self.reported and self.content[block] < step:
                done = self.updated.get((step, block), set())
                self.owed |= {(step, block, actor) for actor in holders(self.shape, block) if actor not in done}

    def _complete_without_ssds(self) -> None:
        if not self.shape.ssd_servers and self._last_over() > self.committed:
            self.committed = self._last_over()
            if self.committed in self.skipped:
                self._relabel(self.committed)

    def _gradients_complete(self, step: int) -> bool:
        return sum(s == step for s, _ in self.reported) == self.shape.num_blocks
