"""Tracks which states are changed, flushed and committed; decides what to flush and when to commit.

Each block has two step numbers. Its *version* is the step whose params an operation finds in it. Its *label* is the
step under which its states are stored: the last step that changed them, or a later skipped step that was committed.
They differ between a skipped step and the next commit.
"""

from windlass.actors.messages import CommitDecided, CommitStore, FlushBlock
from windlass.actors.policy.config import SchedulerConfig
from windlass.actors.policy.pending_replies import Instruction
from windlass.storage.ids import ActorName, BlockIndex, Step


class Commits:
    """The commits of one attempt. Between commits, no state of the last commit is overwritten.

    A step is committed once all SSD servers, of all boxes, have committed it and this is noted durably. A crash before
    that may lead back to the commit before.

    Without SSDs there are no commits, and a step counts as committed as soon as it is over.
    """

    def __init__(self, config: SchedulerConfig, initial_step: Step | None) -> None:
        """`initial_step` is the commit to resume from; None if no state is written yet."""
        first = -1 if initial_step is None else initial_step
        self.committed: int = first
        self.last_step = config.total_steps  # the caller lowers it if the job stops early
        self.versions = [first] * config.num_blocks
        self._config = config
        self._flushed_blocks = config.flushed_blocks
        self._labels = [first] * config.num_blocks
        self._on_ssd = [first] * config.num_blocks  # the label of the states on the SSDs
        self._over: set[Step] = set()  # steps that are over but not committed
        self._flushing: dict[BlockIndex, set[ActorName]] = {}
        self._committing: set[ActorName] = set()
        self._undecided: Step | None = None  # all SSD servers have committed it, but this is not noted durably yet

    def label(self, block: BlockIndex) -> Step:
        """Returns the step under which the states of a block are read."""
        return Step(self._labels[block])

    @property
    def common_label(self) -> Step:
        """The label of all blocks, while no step is partly updated."""
        (label,) = set(self._labels)
        return Step(label)

    def may_update(self, step: int) -> bool:
        """Returns whether updates of a step may begin.

        They overwrite the states of an older commit, so the last commit before the step must be complete.
        """
        return self.committed >= self._config.commit_before(step)

    @property
    def last_complete_step(self) -> int:
        """The last complete step: committed or, if no commit is due before the next step, over.

        If a job stops at a step that is over, that step is incomplete again until it is committed.
        """
        last_before_commit = min(self._config.commit_after(self.committed), self.last_step) - 1
        return max(self.committed, min(last_before_commit, *self.versions))

    # --- what has happened ------------------------------------------------------------------------------------------

    def model_loaded(self) -> None:
        """Records that the initial states are on the SSDs or, without SSDs, in host memory."""
        self._relabel(0)
        self.step_over(Step(0))

    def block_updated(self, block: BlockIndex, step: Step) -> None:
        """Records that a whole block is updated. If its states are not resident in memory, they are on the SSDs."""
        self.versions[block] = self._labels[block] = step
        if block not in self._config.resident_blocks:
            self._on_ssd[block] = step

    def step_over(self, step: Step) -> None:
        """Records that a step is over: all blocks are updated, or the step is skipped and all its gradients discarded.

        A skipped step that is to be committed must be committed before the next one begins.
        """
        self._over.add(step)
        if not self._config.ssd_servers:
            self._mark_committed(step)
        elif not self._is_commit_step(step):
            self.versions = [step] * self._config.num_blocks

    def block_flushed(self, block: BlockIndex, actor: ActorName) -> None:
        """Records that one actor's share of a block is on the SSDs."""
        self._flushing[block].remove(actor)
        if not self._flushing[block]:
            del self._flushing[block]
            self._on_ssd[block] = self._labels[block]

    def store_committed(self, step: Step, actor: ActorName) -> bool:
        """Records that one SSD server has committed the step. Returns whether all have, so that it can be decided."""
        self._committing.remove(actor)
        if self._committing:
            return False
        self._undecided = step
        return True

    def decided(self, step: Step) -> list[Instruction]:
        """Records that it is noted durably that all SSDs have committed the step. Returns the messages to them."""
        assert step == self._undecided, f"step {step} was not to be decided, but {self._undecided}"
        self._undecided = None
        self._mark_committed(step)
        message = CommitDecided(job=self._config.job, step=step)
        return [Instruction(ssd, message) for ssd in self._config.ssd_servers]

    # --- what to do -------------------------------------------------------------------------------------------------

    def advance(self, *, is_computing: bool) -> list[Instruction]:
        """Returns the flushes and commits that can begin. `is_computing`: operations run that may read params."""
        if self._committing or self._undecided is not None:
            return []
        due = None
        if self._over:
            next_commit = min(self._config.commit_after(self.committed), self.last_step)
            due = next_commit if next_commit in self._over else None
        flushes = self._flush(due)
        if due is None or self._on_ssd != self._labels:
            return flushes
        # The commit of a skipped step changes the labels under which params are read.
        if is_computing and self._labels[0] < due:
            return flushes
        return self._commit(Step(due))

    def _flush(self, due: int | None) -> list[Instruction]:
        """Returns the next flushes.

        Without a due commit, only blocks that were last changed by a step to be committed are flushed. With one, all
        other changed blocks follow.
        """
        if not self._flushed_blocks or len(self._flushing) == self._config.ordering.max_flushing:
            return []
        instructions = []
        is_flushed = {label: due is not None or self._is_commit_step(label) for label in set(self._labels)}
        for block in self._flushed_blocks:
            label = self.label(block)
            if label == self._on_ssd[block] or block in self._flushing or not is_flushed[label]:
                continue
            holders = self._config.holders(block)
            self._flushing[block] = set(holders)
            message = FlushBlock(job=self._config.job, step=label, block=block)
            instructions += [Instruction(actor, message) for actor in holders]
            if len(self._flushing) == self._config.ordering.max_flushing:
                break
        return instructions

    def _commit(self, step: Step) -> list[Instruction]:
        (label,) = set(self._labels)
        self._committing = set(self._config.ssd_servers)
        message = CommitStore(
            job=self._config.job,
            step=step,
            attempt=self._config.attempt,
            states_step=Step(label),
        )
        return [Instruction(ssd, message) for ssd in self._config.ssd_servers]

    def _mark_committed(self, step: Step) -> None:
        """Records that the step is committed."""
        self.committed = step
        self._over = {later for later in self._over if later > step}
        if self._labels[0] < step:
            self._relabel(step)

    def _is_commit_step(self, step: int) -> bool:
        return step == self.last_step or self._config.is_commit_step(step)

    def _relabel(self, step: int) -> None:
        self.versions = [step] * self._config.num_blocks
        self._labels, self._on_ssd = list(self.versions), list(self.versions)
