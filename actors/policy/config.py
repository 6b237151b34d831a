"""The facts about a job that the scheduler's policy uses: its blocks, its program of operations, its limits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from windlass.actors.messages import Phase
from windlass.actors.worker_policy import Ordering, Stage, check_stages, passes_of_step, rank_of
from windlass.storage.ids import ActorName, Attempt, BlockIndex, ChunkKey, JobId, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StageActors:
    """A box's part of a job: its blocks, and the actors that compute and update them."""

    blocks: Stage
    gpu_workers: tuple[ActorName, ...]  # by rank
    optimizers: tuple[ActorName, ...]  # the first one loads the box's blocks; that of the first box exports the model


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The facts about a job that decide the order of its work. Block 0 is the embedding, the last block the head."""

    job: JobId
    attempt: Attempt
    chunks: tuple[tuple[ChunkKey, ...], ...]  # of each block
    shared: tuple[tuple[BlockIndex, ...], ...]  # per block: the blocks whose params its operation needs, its own first
    total_steps: int
    num_evaluation_groups: int  # 0: no validation data
    evaluate_every: int  # steps; 0: never
    checkpoint_every: int  # steps; 0: never
    clip_norm: float | None
    keeps_grads: bool  # no update before all gradients of the step are known
    max_bad_steps: int  # largest number of skipped steps in a row
    learning_rate: Callable[[int], float]  # of a step; the first step is 1
    stages: tuple[StageActors, ...]  # one for each box, in the order of the blocks
    # Of all boxes. Empty: the states of all blocks are in host memory, and there are no commits.
    ssd_servers: tuple[ActorName, ...]
    output_dir: str
    # Blocks whose states are resident in host memory or on the device. The states of all others are on the SSDs.
    host_blocks: frozenset[int] = frozenset()
    device_blocks: frozenset[int] = frozenset()
    # Blocks whose kept gradients are spilled to the SSDs, into the space that the next states will overwrite.
    spilled_blocks: frozenset[int] = frozenset()
    commit_every: int = 1  # steps
    # An evaluation's result can request a checkpoint or end the job. Evaluated steps are then committed, and no
    # operation of the next step begins before the evaluation is over.
    evaluation_decides: bool = False
    num_groups: int = 1  # groups of micro-batches in a step; those of one group pass through the blocks together
    has_lanes: bool = False  # a step has several lanes; then a gradient has a sum of squares for each chunk
    ordering: Ordering = field(default_factory=Ordering)
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        check_stages(tuple(stage.blocks for stage in self.stages), self.num_blocks)
        if self.commit_every < 1:
            raise ValueError(
                f"commit_every is {self.commit_every}; states are committed every so many steps, at least 1"
            )
        if self.num_groups < 1:
            raise ValueError(f"num_groups is {self.num_groups}; a step has at least 1 group of micro-batches")
        if both := self.host_blocks & self.device_blocks:
            raise ValueError(
                f"the states of blocks {sorted(both)} must be resident in host memory or on the device, not in both"
            )
        if not self.ssd_servers and len(self.host_blocks) < self.num_blocks:
            raise ValueError(
                f"without SSDs the states of all {self.num_blocks} blocks must be resident in host memory, not of "
                f"{len(self.host_blocks)}"
            )
        if self.spilled_blocks and (self.resident_blocks or self.commit_every > 1):
            raise ValueError(
                f"gradients of blocks {sorted(self.spilled_blocks)} go to the SSDs: then every step must be committed, "
                f"not every {self.commit_every}, and no states may be resident in memory, as those of "
                f"{self.resident_blocks} are"
            )

    @property
    def num_blocks(self) -> int:
        """The number of blocks: embedding, layers and head."""
        return len(self.chunks)

    @property
    def gpu_workers(self) -> tuple[ActorName, ...]:
        """The GPU workers of all boxes, by box and rank."""
        return tuple(actor for stage in self.stages for actor in stage.gpu_workers)

    @property
    def optimizers(self) -> tuple[ActorName, ...]:
        """The optimizers of all boxes."""
        return tuple(actor for stage in self.stages for actor in stage.optimizers)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of ranks of each stage, its GPU workers."""
        return tuple(len(stage.gpu_workers) for stage in self.stages)

    @property
    def model_movers(self) -> tuple[ActorName, ...]:
        """The optimizers that load the blocks of their boxes: the first one of each box. The first box's exports."""
        return tuple(stage.optimizers[0] for stage in self.stages)

    def grads_worker(self, stage: StageActors) -> ActorName:
        """Returns the GPU worker that computes a step's last group of micro-batches, and so completes gradients."""
        return stage.gpu_workers[rank_of(self.num_groups - 1, len(stage.gpu_workers))]

    def stage_of(self, block: int) -> StageActors:
        """Returns the stage of a block."""
        return next(stage for stage in self.stages if stage.blocks.has(block))

    @property
    def resident_blocks(self) -> tuple[BlockIndex, ...]:
        """The blocks whose states are resident in memory, smallest first."""
        return tuple(BlockIndex(block) for block in sorted(self.host_blocks | self.device_blocks))

    @property
    def flushed_blocks(self) -> tuple[BlockIndex, ...]:
        """The blocks that a commit flushes first and a resumed job restores: the resident ones, if there are SSDs."""
        return self.resident_blocks if self.ssd_servers else ()

    def optimizer_of(self, key: ChunkKey) -> ActorName:
        """Returns the optimizer of a chunk whose block is not resident on the device."""
        optimizers = self.stage_of(key.block).optimizers
        return optimizers[key.chunk % len(optimizers)]

    def holders(self, block: int) -> tuple[ActorName, ...]:
        """Returns the actors that update a block and hold its resident states."""
        if block in self.device_blocks:
            return self.stage_of(block).gpu_workers[:1]
        optimizers = self.stage_of(block).optimizers
        if len(optimizers) == 1:
            return optimizers
        return tuple(dict.fromkeys(self.optimizer_of(key) for key in self.chunks[block]))

    @property
    def updating_actors(self) -> tuple[ActorName, ...]:
        """The actors that update a share of any block."""
        return tuple(dict.fromkeys(actor for block in range(self.num_blocks) for actor in self.holders(block)))

    def is_commit_step(self, step: int) -> bool:
        """Returns whether a step is committed by the job's intervals. An early stop commits its last step as well."""
        return step == self.total_steps or any(step % every == 0 for every in self._commit_intervals)

    def commit_before(self, step: int) -> int:
        """Returns the last commit step before this one."""
        return max((step - 1) // every * every for every in self._commit_intervals)

    def commit_after(self, step: int) -> int:
        """Returns the first commit step after this one."""
        return min(self.total_steps, *((step // every + 1) * every for every in self._commit_intervals))

    def is_evaluated(self, step: int) -> bool:
        """Returns whether an evaluation follows a step."""
        is_due = step == self.total_steps or (self.evaluate_every > 0 and step % self.evaluate_every == 0)
        return self.num_evaluation_groups > 0 and is_due

    def num_evaluations_from(self, step: int) -> int:
        """Returns the number of evaluations that follow this step and later ones."""
        if not self.num_evaluation_groups:
            return 0
        last = self.total_steps - 1
        return 1 + (last // self.evaluate_every - (step - 1) // self.evaluate_every if self.evaluate_every else 0)

    @property
    def _commit_intervals(self) -> tuple[int, ...]:
        decides = self.evaluation_decides and self.num_evaluation_groups > 0
        intervals = (self.commit_every, self.checkpoint_every, self.evaluate_every if decides else 0)
        return tuple(every for every in intervals if every)

    def path_of_checkpoint(self, step: int) -> str:
        """Returns the folder of a checkpoint, next to the output folder of the final model."""
        return f"{self.output_dir}-step-{step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One entry of the program: a compute operation or, if `phase` is None, an export.

    No later operation begins before an export is done.
    """

    op: int
    step: Step
    version: Step  # the step whose params it reads
    phase: Phase | None
    block: BlockIndex
    group: int = 0  # index of the group of micro-batches, in the step or in the evaluation

    @property
    def adds_gradients(self) -> bool:
        """True if it adds its group's gradients to the sums of the groups before."""
        return self.phase in (Phase.HEAD, Phase.BACKWARD)

    @property
    def evaluates(self) -> bool:
        """True if it is part of an evaluation."""
        return self.phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD)


def program(shape: SchedulerConfig, first_step: int, rank: int = 0, stage: int = 0) -> Iterator[Operation]:
    """Yields the operations of a rank of a stage from `first_step` on, in the order in which they run.

    These are the groups dealt to the rank, and all exports. The numbers are those of a program of all ranks of the
    stage, and stages take turns in them. So no two ranks of a job have the same.

    The evaluation and the export of the step before come first, because a runner may have been lost between that
    step's commit and them.
    """
    before = first_step - 1
    resumed = ((before, *operation) for operation in _afterwards(shape, before, stage)) if before > 0 else ()
    trained = (
        (step, *operation)
        for step in range(first_step, shape.total_steps + 1)
        for operation in (*_training(shape, step, stage), *_afterwards(shape, step, stage))
    )
    num_ranks = shape.ranks[stage]
    for op, (step, phase, block, group, version) in enumerate(chain(resumed, trained), start=1):
        if phase is None or rank_of(group, num_ranks) == rank:
            yield Operation(
                op=(op - 1) * len(shape.stages) + stage + 1,
                step=Step(step),
                version=Step(version),
                phase=phase,
                block=BlockIndex(block),
                group=group,
            )


def _training(shape: SchedulerConfig, step: int, stage: int) -> Iterator[tuple[Phase | None, int, int, int]]:
    """Yields a stage's operations of a step. Each group of micro-batches passes forward and backward through it."""
    head, blocks = shape.num_blocks - 1, range(*shape.stages[stage].blocks)
    for group, goes_forward in passes_of_step(stage, shape.ranks, shape.num_groups):
        for block in blocks if goes_forward else reversed(blocks):
            if block < head:
                yield Phase.FORWARD if goes_forward else Phase.BACKWARD, block, group, step - 1
            elif goes_forward:  # the head goes forward and backward in one operation
                yield Phase.HEAD, head, group, step - 1


def _afterwards(shape: SchedulerConfig, step: int, stage: int) -> Iterator[tuple[Phase | None, int, int, int]]:
    """Yields a stage's operations of a step's evaluation, and the export, if they are due."""
    head = shape.num_blocks - 1
    last = step == shape.total_steps
    if shape.is_evaluated(step):
        for group in range(shape.num_evaluation_groups):
            for block in range(*shape.stages[stage].blocks):
                yield Phase.EVALUATE_HEAD if block == head else Phase.EVALUATE, block, group, step
    if last or (shape.checkpoint_every and step % shape.checkpoint_every == 0):
        yield None, 0, 0, step
