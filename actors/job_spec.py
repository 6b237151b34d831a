"""What a job is told when it is launched. Plain data: it travels to every actor."""

from dataclasses import dataclass
from enum import StrEnum

from windlass.storage.ids import Attempt, JobId, Precision


class Schedule(StrEnum):
    """How the learning rate falls after warm-up."""

    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"


class Initialization(StrEnum):
    """Where the first weights come from."""

    WEIGHTS = "weights"  # the model folder's safetensors
    RANDOM = "random"  # the architecture's own initialisation, per block, from the job's seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """What changes the result. Every number here is final: "auto" has been resolved."""

    epochs: int
    batch_size: int  # examples a step
    num_microbatches: int  # parts the batch is computed in
    sequence_length: int  # longer examples are cut
    learning_rate: float  # the peak
    warmup_steps: int
    schedule: Schedule
    weight_decay: float  # not applied to norms and biases
    beta1: float
    beta2: float
    epsilon: float
    clip_norm: float | None  # global gradient norm; None: no clipping
    precision: Precision
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One attempt at a job. Paths are absolute and on every node the same."""

    job: JobId
    attempt: Attempt
    model_dir: str  # config, tokenizer, safetensors
    initialization: Initialization
    layout_file: str  # what `windlass.engine.check_model` wrote: the model's blocks
    dataset_dir: str  # what `windlass.engine.prepare` wrote
    num_validation_examples: int  # 0: no validation data
    job_dir: str  # journal and logs
    output_dir: str  # the final model's folder; checkpoints go beside it as `{output_dir}-step-{n}`
    ssd_dirs: tuple[str, ...]  # one SSD server each
    arena_dir: str  # "/dev/shm"
    hyperparameters: Hyperparameters
    total_steps: int
    checkpoint_every: int | None  # steps; None: only the final model
    evaluate_every: int | None  # steps; None: only at the end. Without validation data never
    num_cpu_optimizers: int
    compute_threads: int  # of the GPU worker's process
    optimizer_threads: int  # of each optimizer
    host_memory_nbytes: int | None  # budget for the arena; None: what the machine has free
    deadline_s: float  # longest wait for any one thing within a step

    @property
    def has_validation(self) -> bool:
        """A validation file was given."""
        return self.num_validation_examples > 0
