"""How far the model's states are: changed, on the SSDs, committed. Says what to flush, and when to commit.

Two steps are kept of each block. Its *version* is the step whose params an operation finds in it. Its *label* is the
step under which its states are read and written: the last that changed them or, where a skipped step has been committed
since, that one. They differ between a skipped step and the next commit.
"""

from windlass.actors.messages import CommitStore, FlushBlock
from windlass.actors.policy.config import SchedulerConfig
from windlass.actors.policy.pending_replies import Instruction
from windlass.storage.ids import ActorName, BlockIndex, Step


class Commits:
    """What is safe, and the way there. Between commits nothing of the last commit is overwritten.

    Without SSDs nothing is kept, and a step counts as committed as soon as it is over.
    """

    def __init__(self, shape: SchedulerConfig, initial_step: Step | None) -> None:
        """`initial_step` None: nothing is written yet."""
        first = -1 if initial_step is None else initial_step
        self.committed: int = first
        self.last_step = shape.total_steps  # the caller lowers it where the job stops before
        self.versions = [first] * shape.num_blocks
        self._shape = shape
        self._labels = [first] * shape.num_blocks
        self._on_ssd = [first] * shape.num_blocks  # the label of what the SSDs hold
        self._trainer_states: dict[int, str] = {}  # of steps that are over and not committed
        self._flushing: dict[BlockIndex, set[ActorName]] = {}
        self._committing: set[ActorName] = set()

    def label(self, block: BlockIndex) -> Step:
        """The step under which the states of a block are read."""
        return Step(self._labels[block])

    def may_update(self, step: int) -> bool:
        """An update overwrites what the commit before the last one kept: the last one must be safe."""
        return self.committed >= self._shape.commit_before(step)

    @property
    def settled(self) -> int:
        """Last step of which nothing is outstanding: committed, or over, where no commit is due before the next step.

        Where a job stops at a step that was over, that step is outstanding again until it is committed.
        """
        last_before_commit = min(self._shape.commit_after(self.committed), self.last_step) - 1
        return max(self.committed, min(last_before_commit, *self.versions))

    # --- what has happened ------------------------------------------------------------------------------------------

    def model_loaded(self, trainer_state: str) -> None:
        """The initial states are on the SSDs, or in host memory where there are none."""
        self._relabel(0)
        self.step_over(Step(0), trainer_state)

    def block_updated(self, block: BlockIndex, step: Step) -> None:
        """A whole block has changed; where it rests on the SSDs, it is there."""
        self.versions[block] = self._labels[block] = step
        if block not in self._shape.resident_blocks:
            self._on_ssd[block] = step

    def step_over(self, step: Step, trainer_state: str) -> None:
        """All blocks are updated, or the step is skipped and nothing of it is on its way.

        A skipped step that is to be committed must be safe before the next one begins. `trainer_state`: as it was when
        this was decided.
        """
        self._trainer_states[step] = trainer_state
        if not self._shape.ssd_servers:
            self._settle(step)
        elif not self._is_commit_step(step):
            self.versions = [step] * self._shape.num_blocks

    def block_flushed(self, block: BlockIndex, actor: ActorName) -> None:
        """One actor's share is on the SSDs."""
        self._flushing[block].remove(actor)
        if not self._flushing[block]:
            del self._flushing[block]
            self._on_ssd[block] = self._labels[block]

    def store_committed(self, step: Step, actor: ActorName) -> None:
        """One SSD server has the step safe."""
        self._committing.remove(actor)
        if not self._committing:
            self._settle(step)

    # --- what to do -------------------------------------------------------------------------------------------------

    def advance(self, *, is_computing: bool) -> list[Instruction]:
        """Flushes and commits that can begin. `is_computing`: operations are out, which may read params."""
        if self._committing:
            return []
        due = min(filter(self._is_commit_step, self._trainer_states), default=None)
        flushes = self._flush(due)
        if due is None or self._on_ssd != self._labels:
            return flushes
        # The commit of a skipped step changes the labels under which params are read.
        if is_computing and self._labels[0] < due:
            return flushes
        return self._commit(Step(due))

    def _flush(self, due: int | None) -> list[Instruction]:
        """As soon as a step that is to be committed has changed a block; all others before a skipped step's commit."""
        found = []
        for block in self._shape.flushed_blocks:
            label = self.label(block)
            if len(self._flushing) == self._shape.ordering.max_flushing:
                break
            if label == self._on_ssd[block] or block in self._flushing:
                continue
            if due is None and not self._is_commit_step(label):
                continue
            holders = self._shape.holders(block)
            self._flushing[block] = set(holders)
            message = FlushBlock(job=self._shape.job, step=label, block=block)
            found += [Instruction(actor, message) for actor in holders]
        return found

    def _commit(self, step: Step) -> list[Instruction]:
        (label,) = set(self._labels)
        self._committing = set(self._shape.ssd_servers)
        message = CommitStore(
            job=self._shape.job,
            step=step,
            attempt=self._shape.attempt,
            states_step=Step(label),
            trainer_state=self._trainer_states[step],
        )
        return [Instruction(ssd, message) for ssd in self._shape.ssd_servers]

    def _settle(self, step: Step) -> None:
        """The step is committed."""
        self.committed = step
        self._trainer_states = {each: state for each, state in self._trainer_states.items() if each > step}
        if self._labels[0] < step:
            self._relabel(step)

    def _is_commit_step(self, step: int) -> bool:
        return step == self.last_step or self._shape.is_commit_step(step)

    def _relabel(self, step: int) -> None:
        self.versions = [step] * self._shape.num_blocks
        self._labels, self._on_ssd = list(self.versions), list(self.versions)
