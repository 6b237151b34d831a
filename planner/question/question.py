"""The question to the planner: a job on a machine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.engine.lanes import rounded_to_lanes
from windlass.engine.memory_plan import (
    ExampleLengths,
    allocatable_nbytes,
)
from windlass.engine.training_config import TrainingConfig
from windlass.planner.cost import Speeds, Ways, speeds_of, ways_of_layer
from windlass.planner.hardware import Hardware
from windlass.planner.predictions import Correction, PastPredictions
from windlass.planner.profiling import MachinePace, TimingCache, pace_of_an_answer
from windlass.planner.question.kept_shapes import KeptShapes
from windlass.planner.solver import (
    Limits,
    budgets_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """A job on a machine. `config`: a transformers config, or one that is not loaded yet."""

    config: Any
    hardware: Hardware
    training: TrainingConfig
    chooses_microbatches: bool = False  # search the fastest number of micro-batches, instead of the config's
    chooses_cut: bool = False  # choose whether and how matrices are cut, instead of the config's
    # Choose the order of updates, of those that give the same parameters, instead of the config's.
    chooses_order: bool = False
    # Of the job's data, by batch size and number of micro-batches; None: every example is as long as `sequence_length`.
    lengths: Callable[[int, int], ExampleLengths] | None = None
    num_validation_examples: int = 0  # an evaluation computes as many micro-batches at once as a step
    num_ranks: int = 1  # GPU workers, each with a GPU of its own
    chooses_ranks: bool = False  # `choose_gpus` searches the fastest number up to `num_ranks`
    num_optimizers: int = 1
    num_layers: int | None = None  # pretend this number of layers, all like the first; None: those of the config
    host_memory_nbytes: int | None = None  # budget of the arena; None: all of the machine's
    device_memory_nbytes: int | None = None  # budget; None: all of the device's
    measure_threads: int | None = None  # of torch while it measures; None: as many as it has
    measures: bool = False  # time the blocks on this machine's device; `hardware` must then describe this machine
    measures_apart: bool = False  # another process measures; see `measure_first`
    leaves_unmeasured: bool = False  # nothing is measured, and the plan tells how long that would take
    kept_facts_dir: Path | None = None  # of traced models; None: they are not stored
    on_trace: Callable[[], None] | None = None  # called before the model is traced, which takes seconds
    kept_times: TimingCache | None = None  # stored block times; None: blocks are always measured
    kept_shapes: KeptShapes | None = None  # of earlier plans in this process; None: every model is profiled anew
    # This machine's, as it is at its first use for this question and those made from it.
    pace: MachinePace = field(default_factory=pace_of_an_answer, compare=False)
    past: PastPredictions | None = None  # of this machine's jobs; None: another machine, or none are known
    ways: Ways = ways_of_layer  # options for a layer's activations
    # From the job's own steps, with the same number of micro-batches. If set, no blocks are measured.
    correction: Correction = field(default_factory=Correction)

    def changed(self, **training: Any) -> "PlanQuestion":
        """Returns the question for a job with some fields of the training config changed.

        If they include `num_microbatches` or `cut_matrices`, the planner does not choose it. Lanes and GPUs that would
        have no micro-batch are left out.
        """
        chooses_cut = self.chooses_cut and "cut_matrices" not in training
        chooses = self.chooses_microbatches and "num_microbatches" not in training
        number = training.get("num_microbatches", self.training.num_microbatches)
        training = {"lanes": min(self.training.lanes, number)} | training
        num_ranks = min(self.num_ranks, number)
        training_then = replace(self.training, **training)
        return replace(
            self,
            training=training_then,
            num_ranks=num_ranks,
            chooses_microbatches=chooses,
            chooses_cut=chooses_cut,
        )

    @property
    def measures_here(self) -> bool:
        """True if this process measures the times that plans lack."""
        return self.measures and not (self.measures_apart or self.leaves_unmeasured)

    @property
    def least_microbatches(self) -> int:
        """The smallest number of micro-batches with which lanes are equal and no GPU is without one."""
        return rounded_to_lanes(self.num_ranks, self.training.lanes)

    @property
    def widest(self) -> int:
        """Tokens of the widest micro-batch that can occur.

        The engine pads a micro-batch to its longest example, not to `sequence_length`. If all examples are shorter, the
        plan needs no memory and no time for `sequence_length` tokens.
        """
        # The widest is as wide with any number of micro-batches.
        length, lengths = self.training.sequence_length, self.lengths_in(self.training.num_microbatches)
        return length if lengths is None else min(lengths.longest, length)

    def lengths_in(self, num_microbatches: int) -> ExampleLengths | None:
        """Returns the lengths of the job's examples for this number of micro-batches, or None without data."""
        return None if self.lengths is None else self.lengths(self.training.batch_size, num_microbatches)

    @property
    def budgets(self) -> Limits:
        """The memory that the job may use: that of the machine, limited by the job's budgets."""
        return budgets_of(
            self.hardware,
            num_ranks=self.num_ranks,
            host_memory_nbytes=self.host_memory_nbytes,
            device_memory_nbytes=self.device_memory_nbytes,
        )

    @property
    def limits(self) -> Limits:
        """The memory that the job may allocate: its budgets, without what PyTorch's allocator reserves on a GPU."""
        budgets = self.budgets
        return replace(budgets, device_nbytes=allocatable_nbytes(budgets.device_nbytes)) if self.has_gpu else budgets

    @property
    def has_gpu(self) -> bool:
        """False if the device that computes is the CPU."""
        return self.hardware.gpus.count > 0

    @property
    def speeds(self) -> Speeds:
        """The machine's rates, with the correction by measured steps."""
        return self.correction.of_speeds(speeds_of(self.hardware, self.num_ranks, self.training.precision))
