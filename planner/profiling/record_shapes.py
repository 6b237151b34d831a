"""Traces a model at shapes of primes, so that sizes show how often the numbers of examples and tokens are in them."""

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.engine.device import TORCH_DTYPE
from windlass.engine.memory_estimate import DryRun, DryRunResult, Passes, PassNeeds
from windlass.engine.memory_plan import BlockActivations
from windlass.planner.profiling.known import RecordedSizes, operators_in, unit_of
from windlass.planner.profiling.model_profiler import TracedModel
from windlass.storage.ids import BlockIndex, Precision


class RecordedModel(TracedModel):
    """A traced model whose facts can be stored. All its results are JSON values."""

    def __init__(self, config: Any, precision: Precision) -> None:
        """`config`: a transformers config."""
        super().__init__(config, precision)
        self._recorded: dict[tuple[int, int], tuple[RecordedSizes, DryRunResult]] = {}

    def basics(self) -> dict[str, Any]:
        """Returns the facts that depend on no shape."""
        return {
            "name": self.name,
            "hidden_size": self.hidden_size,
            "head_matrix_numel": self.head_matrix_numel,
            "vocab_size": self.vocab_size,
            "buffers_nbytes": self.buffers_nbytes,
            "layout": self.layout.to_json(),
        }

    def needs_and_kinds(
        self, choices: Mapping[BlockIndex, BlockActivations], passes: Passes
    ) -> tuple[PassNeeds, list[int]]:
        """Returns the needs, and for each layer the first layer that has the same needs with the same choice."""
        needs = self.needs(choices, passes)
        run = self._dry_run(choices, passes, self._results)
        return needs, _first_alike(run.kinds(passes.num_examples, passes.num_tokens, train=passes.train))

    def recorded_units(
        self,
        choices: Mapping[BlockIndex, BlockActivations],
        passes: Passes,
        num_examples: int,
        num_tokens: int,
    ) -> tuple[list[int], list[Any]]:
        """Returns what is found at this shape of primes.

        These are the first layer of the kind of each layer, and the formulas of the embedding's and each layer's needs.
        """
        sizes, results = self._of_primes(num_examples, num_tokens)
        run = self._dry_run(choices, passes, results, sizes)
        units, _ = run.units(num_examples, num_tokens, train=passes.train)
        kinds = run.kinds(num_examples, num_tokens, train=passes.train)
        return _first_alike(kinds), [unit_of(sizes, unit) for unit in units]

    def recorded_operators(self, block: BlockIndex, num_examples: int, num_tokens: int) -> dict[str, Any]:
        """Returns the formulas of a layer's operators, found at this shape of primes."""
        sizes, _ = self._of_primes(num_examples, num_tokens)
        return operators_in(sizes, self.operators(block, num_examples, num_tokens))

    def _of_primes(self, num_examples: int, num_tokens: int) -> tuple[RecordedSizes, DryRunResult]:
        shape = (num_examples, num_tokens)
        if shape not in self._recorded:
            primes = {name: (size, 1) for name, size in zip("BT", shape, strict=True) if size > 1}
            self._recorded[shape] = RecordedSizes(primes, max_factor=None), DryRunResult()
        return self._recorded[shape]

    def _dry_run(
        self,
        choices: Mapping[BlockIndex, BlockActivations],
        passes: Passes,
        results: DryRunResult,
        sizes: RecordedSizes | None = None,
    ) -> DryRun:
        return DryRun(
            self.partition,
            choices,
            grad_dtype=TORCH_DTYPE[passes.grad_precision],
            is_summed=passes.is_summed,
            head_slices=passes.head_slices,
            cut_matrices=passes.cut_matrices,
            rehearsed=results,
            sizes=sizes,
        )


def _first_alike(kinds: Sequence[object]) -> list[int]:
    """Returns for each layer the first one of its kind. Layers count from 1."""
    first: dict[object, int] = {}
    return [first.setdefault(kind, layer) for layer, kind in enumerate(kinds, start=1)]
