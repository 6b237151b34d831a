"""The specification of a job's attempt: plain data that is sent to every actor at the launch."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

from windlass.actors.job.pace import Pace
from windlass.actors.worker_policy import Ordering, Stage
from windlass.engine.memory_plan import Placement
from windlass.engine.training_config import FinalModel, TrainingConfig
from windlass.storage.ids import FIRST_EPOCH, Attempt, JobId, LayoutEpoch

_FIRST_ATTEMPT = Attempt(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCore:
    """The part of a job's specification that decides its plan and the order of its work. It names no files."""

    job: JobId
    attempt: Attempt = _FIRST_ATTEMPT
    layout_epoch: LayoutEpoch = FIRST_EPOCH  # in which the chunks were dealt to the job's SSDs
    training: TrainingConfig
    num_validation_examples: int = 0  # 0: no validation data
    num_ranks: int = 1  # GPU workers of the box, each with its own GPU; results do not depend on how many there are
    ranks_of_boxes: tuple[int, ...] = ()  # GPU workers of each box; empty: all have `num_ranks`
    stages: tuple[Stage, ...] = ()  # the blocks of each box; empty: one box has all
    box: int = 0  # index of the box that this specification is for
    box_names: tuple[str, ...] = ()  # of all boxes, for users; empty: they are called by their indexes
    num_cpu_optimizers: int = 1
    host_memory_nbytes: int | None = None  # budget for the arena; None: limited by the machine's free memory
    deadline_s: float  # timeout of an actor that must reply and sends neither reply nor progress; also of its end
    placement: Placement = field(default_factory=Placement)  # places of states, params and activations; may be partial
    ordering: Ordering = field(default_factory=Ordering)  # as configured; the scheduler uses `effective_ordering`

    def __post_init__(self) -> None:
        """Refuses numbers of GPU workers that are not those of the boxes."""
        if (ranks := self.ranks_of_boxes) and (
            len(ranks) != len(self.stages) or min(ranks) < 1 or ranks[self.box] != self.num_ranks
        ):
            raise ValueError(
                f"ranks_of_boxes is {ranks}; it must have a number for each of {len(self.stages)} stages, and be "
                f"{self.num_ranks} for box {self.box}"
            )

    @property
    def names_of_boxes(self) -> tuple[str, ...]:
        """The names of the boxes, for users. Empty if one box has all blocks."""
        return self.box_names or tuple(f"box {index}" for index in range(len(self.stages)))

    def told_by_box(self, text: str, box: int) -> str:
        """Returns a text of one of a box's actors for users. It names the box if the job has several."""
        name = self.name_of_box(box)
        return f"{name[0].upper()}{name[1:]}: {text}" if len(self.stages) > 1 else text

    def name_of_box(self, box: int) -> str:
        """Returns the name of a box in a sentence for users: "box attic", or "box 1" if it has none."""
        return f"box {self.box_names[box] if self.box_names else box}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of GPU workers of each box."""
        return self.ranks_of_boxes or (self.num_ranks,) * max(1, len(self.stages))

    @property
    def has_validation(self) -> bool:
        """True if the job has validation data."""
        return self.num_validation_examples > 0

    @property
    def keeps_best(self) -> bool:
        """True if the model with the lowest validation loss is kept as a checkpoint."""
        return self.has_validation and (self.training.keep_best or self.training.final_model is FinalModel.BEST)

    @property
    def evaluation_decides(self) -> bool:
        """True if an evaluation's result can request a checkpoint or end the job."""
        return self.keeps_best or (self.has_validation and self.training.early_stopping is not None)

    @property
    def effective_ordering(self) -> Ordering:
        """The ordering in use: `ordering`, but without overlap if updates run after the backward pass."""
        if self.training.order_of_updates.overlaps_steps:
            return self.ordering
        return replace(self.ordering, overlaps_steps=False)

    def with_training(self, **changes: Any) -> Self:
        """Returns a copy with some fields of the training config changed."""
        return replace(self, training=replace(self.training, **changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec(JobCore):
    """One attempt at a job, as one of its boxes sees it. Paths are absolute, and are those of the box.

    The boxes of a job need no file system in common. Each has a copy of the model, the layout and the dataset. Only the
    first box has the journal, the spans and the exported models.
    """

    model_dir: str  # config, tokenizer, safetensors
    layout_file: str  # the model's blocks, written by `windlass.engine.checkpoint.check_model`
    dataset_dir: str  # the dataset, written by `windlass.engine.data.tokenize`
    job_dir: str  # journal and logs; on other boxes than the first one logs only
    output_dir: str  # the final model's folder, on the first box; checkpoints are written to `{output_dir}-step-{n}`
    ssd_dirs: tuple[str, ...]  # one SSD server each; empty: all states are in host memory, and a crash loses the job
    arena_dir: str = "/dev/shm"
    compute_threads: int = 1  # of the GPU worker's process
    optimizer_threads: int = 1  # of each optimizer
    kernel_dir: str | None = None  # cache folder of compiled update kernels; None: no cache
    device_memory_nbytes: int | None = None  # budget on the device; None: all of its memory
    planned_device_nbytes: int | None = None  # the plan's peak on the device; None: it is counted when the job starts
    # The time of a step by the job's plan or its earlier attempts, used until this attempt has measured its own.
    expected_pace: Pace | None = None
