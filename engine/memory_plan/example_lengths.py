"""The lengths of a data set's examples that plans need. All are in tokens, padding included."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Tokens: widths of micro-batches are multiples of this, for few different shapes and aligned matrix products.
WIDTH_GRANULE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleLengths:
    """The widths of a job's micro-batches: each is padded to its longest example.

    A job's memory must suffice for the widest possible micro-batch, while its time depends on the means. The means
    are taken over the rows of full micro-batches; a missing row of a smaller batch counts as 0.
    """

    longest: int  # the width of the widest possible micro-batch
    mean: float  # of a row's width; the time of most operations grows with it
    mean_square: float  # of a row's width; the time of attention grows with it
    longest_validation: int = 0  # the width of the widest micro-batch of an evaluation; 0 without validation data
    num_validation_examples: int = 0

    def __post_init__(self) -> None:
        """Refuses impossible means, because they would give operations of negative size."""
        if not 0 < self.mean <= self.longest or self.mean_square < self.mean**2 * (1 - 1e-9):
            raise ValueError(
                f"no rows of at most {self.longest} tokens have the mean {self.mean} and the mean square "
                f"{self.mean_square}"
            )

    def cut(self, sequence_length: int) -> "ExampleLengths":
        """Returns the lengths for examples cut at another length. The means are then upper bounds."""
        mean = min(self.mean, sequence_length)
        return replace(
            self,
            longest=min(self.longest, sequence_length),
            mean=mean,
            mean_square=max(mean**2, min(self.mean_square, sequence_length**2)),
            longest_validation=min(self.longest_validation, sequence_length),
        )

    def evaluation_shapes(self, num_examples: int, num_microbatches: int) -> list[tuple[int, int]]:
        """Returns (examples, tokens) of each micro-batch of an evaluation's first group."""
        return evaluation_shapes(self.num_validation_examples, self.longest_validation, num_examples, num_microbatches)


def evaluation_shapes(
    num_validation_examples: int, width: int, num_examples: int, num_microbatches: int
) -> list[tuple[int, int]]:
    """Returns (examples, tokens) of the micro-batches of an evaluation's first group, as if all were `width` wide.

    `num_examples`: examples of a micro-batch; only the last one has fewer. `num_microbatches`: those of a group.
    """
    num_full, num_rest = divmod(min(num_validation_examples, num_examples * num_microbatches), num_examples)
    return [(num_examples, width)] * num_full + [(num_rest, width)] * (num_rest > 0)


def tokens_in_words(tokens: Mapping[str, Any]) -> str:
    """Describes the lengths of examples that a plan was made for (`planner.report.ExampleTokens`)."""
    if not tokens["of_data"]:
        return f"examples of {tokens['limit']} tokens; shorter ones take less"
    return f"examples of {tokens['mean']:.0f} tokens on average and {tokens['widest']} at most, with padding"
