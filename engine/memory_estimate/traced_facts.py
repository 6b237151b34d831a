"""The facts of a model, found by running its blocks with fake tensors."""

from collections.abc import Mapping

from windlass.engine.device import TORCH_DTYPE
from windlass.engine.memory_estimate.dry_run import DryRun, DryRunResult
from windlass.engine.memory_estimate.model_facts import Passes, PassNeeds
from windlass.engine.memory_plan import BlockActivations
from windlass.engine.model import ModelLayout, Partition
from windlass.storage.ids import BlockIndex


class TracedFacts:
    """Implements `ModelFacts` for a partition. No other runner of the partition may be in use during a call."""

    def __init__(self, partition: Partition, *, device: str = "cpu") -> None:
        """`device`: the device type of the job, because operators choose their kernels by it."""
        self.partition, self._device = partition, device
        self._results = DryRunResult()

    @property
    def layout(self) -> ModelLayout:
        """See ModelFacts."""
        return self.partition.layout

    @property
    def vocab_size(self) -> int:
        """See ModelFacts."""
        return int(self.partition.model.config.vocab_size)

    @property
    def buffers_nbytes(self) -> int:
        """See ModelFacts."""
        return sum(buffer.nbytes for buffer in self.partition.model.buffers())

    def needs(self, choices: Mapping[BlockIndex, BlockActivations], passes: Passes) -> PassNeeds:
        """See ModelFacts."""
        dry_run = DryRun(
            self.partition,
            choices if passes.train else {},
            grad_dtype=TORCH_DTYPE[passes.grad_precision],
            is_summed=passes.is_summed,
            head_slices=passes.head_slices,
            cut_matrices=passes.cut_matrices,
            device=self._device,
            rehearsed=self._results,
        )
        units, head_peak_nbytes = dry_run.units(passes.num_examples, passes.num_tokens, train=passes.train)
        return PassNeeds(units=tuple(units), head_peak_nbytes=head_peak_nbytes)
