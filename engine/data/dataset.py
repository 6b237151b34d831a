"""Reads prepared training data: token files mapped into memory, and batches in an order that only the seed decides."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from windlass.engine.data.examples import FORMAT_VERSION, NO_TARGET
from windlass.engine.memory_plan import WIDTH_GRANULE, ExampleLengths

if TYPE_CHECKING:  # the planner reads lengths only, and loads no torch for them
    import torch

# Steps of a job whose batches give the mean widths. Batches are random, so more steps would not change the means.
MAX_SAMPLED_STEPS = 1000


class DatasetError(Exception):
    """A prepared dataset's folder is missing, incomplete or of another version."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Examples that are computed together, padded on the right.

    There is no attention mask, because the models are causal: no real position attends to the padding after it. Padded
    positions have no target, so their outputs are unused.
    """

    input_ids: "torch.Tensor"  # (B, T) int64
    targets: "torch.Tensor"  # (B, T) int64: the token to predict after each position, or -100

    @property
    def num_targets(self) -> int:
        """The number of target tokens. A step's loss is the mean over them."""
        return int((self.targets != NO_TARGET).sum())


class ExampleOrder:
    """The lengths of a split's examples, and their order in batches. It maps no tokens."""

    def __init__(self, *, offsets: npt.NDArray[np.int64], sequence_length: int) -> None:
        self._offsets = offsets
        self.sequence_length = sequence_length
        # The last requested epoch as (seed, epoch), and its order.
        self._order: tuple[tuple[int, int], npt.NDArray[np.int64]] | None = None

    @classmethod
    def of_folder(cls, directory: Path, split: str) -> "ExampleOrder":
        """Opens the order of a split of a prepared folder. Raises `DatasetError`."""
        meta, counts = _counts_of(directory, split)
        offsets = _map(directory / f"{split}.offsets", np.int64, counts["num_examples"] + 1)
        return ExampleOrder(offsets=offsets, sequence_length=meta["sequence_length"])

    @property
    def num_examples(self) -> int:
        """The number of examples in the split."""
        return len(self._offsets) - 1

    @property
    def longest_width(self) -> int:
        """The width in tokens of a micro-batch with the longest example."""
        return self._width(int(np.diff(self._offsets).max()))

    def steps_per_epoch(self, batch_size: int) -> int:
        """Returns the number of steps that use every example once. The last one may be smaller."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        return -(-self.num_examples // batch_size)

    def largest_shapes(self, batch_size: int, num_microbatches: int) -> list[tuple[int, int]]:
        """Returns (B, T) of each micro-batch of a step, as if all were as wide as the longest example."""
        examples = np.arange(min(batch_size, self.num_examples))
        parts = np.array_split(examples, num_microbatches)
        width = self.longest_width
        return [(len(part), width) for part in parts if len(part)]

    def mean_widths(
        self, batch_size: int, num_microbatches: int, seed: int, *, num_steps: int, max_steps: int = MAX_SAMPLED_STEPS
    ) -> tuple[float, float]:
        """Returns the mean of a row's tokens, padding included, and the mean of their square, over a job's first steps.

        The steps are those of `PreparedDataset.batch`. Each counts as `num_microbatches` micro-batches with as many
        rows as the fullest one; missing rows have no tokens. `num_steps`: the number of steps of the job.
        """
        num_steps = min(num_steps, max_steps)
        rows_of_step = num_microbatches * -(-batch_size // num_microbatches)
        tokens = squares = 0
        for step in range(num_steps):
            for part in self._parts(step, batch_size, num_microbatches, seed):
                width = self._width(self._longest(part))
                tokens += len(part) * width
                squares += len(part) * width**2
        return tokens / (num_steps * rows_of_step), squares / (num_steps * rows_of_step)

    def num_microbatches_of(self, step: int, batch_size: int, num_microbatches: int) -> int:
        """Returns the number of micro-batches of a step, counted from 0. The last step of an epoch may have fewer."""
        place = step % self.steps_per_epoch(batch_size)
        return min(num_microbatches, batch_size, self.num_examples - place * batch_size)

    def _parts(self, step: int, batch_size: int, num_microbatches: int, seed: int) -> list[npt.NDArray[np.int64]]:
        """Returns the example indices of each micro-batch of a step."""
        epoch, place = divmod(step, self.steps_per_epoch(batch_size))
        examples = self._epoch_order(seed, epoch)[place * batch_size : (place + 1) * batch_size]
        return [part for part in np.array_split(examples, num_microbatches) if len(part)]

    def _longest(self, examples: npt.NDArray[np.int64]) -> int:
        """Returns the tokens of the longest of the given examples."""
        return int((self._offsets[examples + 1] - self._offsets[examples]).max())

    def _epoch_order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != (seed, epoch):
            order = np.random.Generator(np.random.Philox([seed, epoch])).permutation(self.num_examples)
            self._order = ((seed, epoch), order)
        return self._order[1]

    def _width(self, longest: int) -> int:
        """Returns the width in tokens of a micro-batch whose longest example has `longest` tokens."""
        return min(-(-longest // WIDTH_GRANULE) * WIDTH_GRANULE, self.sequence_length)


class PreparedDataset(ExampleOrder):
    """One split of a folder that `windlass.engine.data.tokenize` wrote. It reads examples on demand."""

    def __init__(
        self,
        *,
        tokens: npt.NDArray[np.int32],
        targets: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
        sequence_length: int,
        num_targets: int,
    ) -> None:
        super().__init__(offsets=offsets, sequence_length=sequence_length)
        self._tokens = tokens
        self._targets = targets
        self.num_targets = num_targets

    @classmethod
    def open(cls, directory: str | Path, split: str) -> "PreparedDataset":
        """Maps a split ("train" or "validation") of a prepared folder. Raises `DatasetError`."""
        directory = Path(directory)
        meta, counts = _counts_of(directory, split)
        return cls(
            tokens=_map(directory / f"{split}.tokens", np.int32, counts["num_tokens"]),
            targets=_map(directory / f"{split}.targets", np.int32, counts["num_tokens"]),
            offsets=_map(directory / f"{split}.offsets", np.int64, counts["num_examples"] + 1),
            sequence_length=meta["sequence_length"],
            num_targets=counts["num_targets"],
        )

    def batch(self, step: int, batch_size: int, num_microbatches: int, seed: int) -> list[MicroBatch]:
        """Returns the micro-batches of a step, counted from 0: at most `num_microbatches`, none of them empty.

        The same arguments give the same micro-batches.
        """
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, not {num_microbatches}")
        return [self._microbatch(part) for part in self._parts(step, batch_size, num_microbatches, seed)]

    def evaluation_batches(self, batch_size: int) -> Iterator[MicroBatch]:
        """Yields all examples in the file's order, `batch_size` at a time."""
        for place in range(self.steps_per_epoch(batch_size)):
            stop = min((place + 1) * batch_size, self.num_examples)
            yield self._microbatch(np.arange(place * batch_size, stop))

    def _microbatch(self, examples: npt.NDArray[np.int64]) -> MicroBatch:
        import torch

        starts, stops = self._offsets[examples], self._offsets[examples + 1]
        width = self._width(self._longest(examples))
        # Any id can serve as padding; 0 is in every vocabulary.
        input_ids = np.zeros((len(examples), width), dtype=np.int64)
        targets = np.full((len(examples), width), NO_TARGET, dtype=np.int64)
        for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            input_ids[row, : stop - start] = self._tokens[start:stop]
            targets[row, : stop - start] = self._targets[start:stop]
        return MicroBatch(torch.from_numpy(input_ids), torch.from_numpy(targets))


def _counts_of(directory: Path, split: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Returns a prepared folder's description, and the counts of one of its splits."""
    meta = _meta_of(directory)
    if split not in meta["splits"]:
        raise DatasetError(f'{directory} has no split "{split}", only {sorted(meta["splits"])}')
    return meta, meta["splits"][split]


def _map(path: Path, dtype: type[np.generic], size: int) -> npt.NDArray[Any]:
    """Maps a file of `size` numbers into memory."""
    expected = size * np.dtype(dtype).itemsize
    if not path.is_file() or path.stat().st_size != expected:
        raise DatasetError(f"{path} is missing or not {expected} bytes long; prepare the dataset again")
    try:
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:  # for example the planner's process has reached its limit of mapped memory
        raise DatasetError(f"{path} cannot be mapped into memory: {error}") from error


def _meta_of(directory: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((directory / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise DatasetError(f"{directory} is not a prepared dataset: {error}") from error
    if meta["version"] != FORMAT_VERSION:
        raise DatasetError(f"{directory} has format {meta['version']}, expected {FORMAT_VERSION}; prepare it again")
    return meta


def example_lengths(
    directory: Path, *, batch_size: int, num_microbatches: int, seed: int, num_steps: int
) -> ExampleLengths:
    """Returns the widths of a job's micro-batches, from the lengths of its examples alone.

    It does not map the tokens, because they may exceed the mapping limit of the planner's process. `directory`: a
    folder that `windlass.engine.data.tokenize` wrote. The other arguments are those of `ExampleOrder.mean_widths`.

    Raises:
        DatasetError: the folder is missing or incomplete.
    """
    train = ExampleOrder.of_folder(directory, "train")
    mean, mean_square = train.mean_widths(batch_size, num_microbatches, seed, num_steps=num_steps)
    lengths = ExampleLengths(longest=train.longest_width, mean=mean, mean_square=mean_square)
    if "validation" not in _meta_of(directory)["splits"]:
        return lengths
    validation = ExampleOrder.of_folder(directory, "validation")
    return replace(
        lengths, longest_validation=validation.longest_width, num_validation_examples=validation.num_examples
    )
