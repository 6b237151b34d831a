"""Prepared training data: token files mapped into memory, cut into batches in an order that the seed alone decides."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from windlass.engine.data.examples import FORMAT_VERSION, NO_TARGET
from windlass.engine.memory_plan import ExampleLengths

# Widths are multiples of this: few different shapes, and aligned matrix products.
WIDTH_GRANULE = 8
# Steps of a job whose batches are looked at for their mean widths; they are in random order, so that more tell no more.
MAX_SAMPLED_STEPS = 1000


class DatasetError(Exception):
    """A prepared dataset's folder is missing, incomplete or of another version."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Examples computed at once, padded on the right.

    There is no attention mask: the models are causal, so no real position sees the padding after it, and padded
    positions carry no target, so what they compute goes nowhere.
    """

    input_ids: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64: the token to predict after each position, or -100

    @property
    def num_targets(self) -> int:
        """Target tokens, over which the step's loss is averaged."""
        return int((self.targets != NO_TARGET).sum())


class ExampleOrder:
    """The lengths of a split's examples, and the batches that they come in; maps no tokens."""

    def __init__(self, *, offsets: npt.NDArray[np.int64], sequence_length: int) -> None:
        self._offsets = offsets
        self.sequence_length = sequence_length
        # The order of the epoch that was asked for last.
        self._order: tuple[tuple[int, int], npt.NDArray[np.int64]] | None = None

    @classmethod
    def of_folder(cls, directory: Path, split: str) -> "ExampleOrder":
        """That of a split of a prepared folder. Raises `DatasetError`."""
        meta, counts = _counts_of(directory, split)
        offsets = _map(directory / f"{split}.offsets", np.int64, counts["num_examples"] + 1)
        return ExampleOrder(offsets=offsets, sequence_length=meta["sequence_length"])

    @property
    def num_examples(self) -> int:
        """Examples of the split."""
        return len(self._offsets) - 1

    @property
    def longest_width(self) -> int:
        """Tokens of the widest micro-batch that can occur: one with the longest example."""
        return self._width(int(np.diff(self._offsets).max()))

    def steps_per_epoch(self, batch_size: int) -> int:
        """Steps that see every example once; the last may be smaller."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        return -(-self.num_examples // batch_size)

    def largest_shapes(self, batch_size: int, num_microbatches: int) -> list[tuple[int, int]]:
        """(B, T) of each micro-batch of a step, if all were as long as the longest example."""
        examples = np.arange(min(batch_size, self.num_examples))
        parts = np.array_split(examples, num_microbatches)
        width = self.longest_width
        return [(len(part), width) for part in parts if len(part)]

    def mean_widths(
        self, batch_size: int, num_microbatches: int, seed: int, *, num_steps: int, max_steps: int = MAX_SAMPLED_STEPS
    ) -> tuple[float, float]:
        """The mean of a row's tokens with its padding, and of their square, over a job's first steps.

        These are the steps that `PreparedDataset.batch` makes; each is taken to have `num_microbatches` micro-batches
        of as many rows as the fullest, of which those that are not there have no tokens. `num_steps`: of the job.
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

    def _parts(self, step: int, batch_size: int, num_microbatches: int, seed: int) -> list[npt.NDArray[np.int64]]:
        """The examples of each micro-batch of a step."""
        epoch, place = divmod(step, self.steps_per_epoch(batch_size))
        examples = self._epoch_order(seed, epoch)[place * batch_size : (place + 1) * batch_size]
        return [part for part in np.array_split(examples, num_microbatches) if len(part)]

    def _longest(self, examples: npt.NDArray[np.int64]) -> int:
        """Tokens of the longest of some examples."""
        return int((self._offsets[examples + 1] - self._offsets[examples]).max())

    def _epoch_order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != (seed, epoch):
            order = np.random.Generator(np.random.Philox([seed, epoch])).permutation(self.num_examples)
            self._order = ((seed, epoch), order)
        return self._order[1]

    def _width(self, longest: int) -> int:
        """Tokens of a micro-batch whose longest example is so long."""
        return min(-(-longest // WIDTH_GRANULE) * WIDTH_GRANULE, self.sequence_length)


class PreparedDataset(ExampleOrder):
    """One split of a folder that `windlass.engine.data.prepare` wrote. Reads examples as needed."""

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
        """The micro-batches of a step, from 0: at most `num_microbatches`, none empty, same for the same arguments."""
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, not {num_microbatches}")
        return [self._microbatch(part) for part in self._parts(step, batch_size, num_microbatches, seed)]

    def evaluation_batches(self, batch_size: int) -> Iterator[MicroBatch]:
        """All examples in the file's order, `batch_size` at a time."""
        for place in range(self.steps_per_epoch(batch_size)):
            stop = min((place + 1) * batch_size, self.num_examples)
            yield self._microbatch(np.arange(place * batch_size, stop))

    def _microbatch(self, examples: npt.NDArray[np.int64]) -> MicroBatch:
        starts, stops = self._offsets[examples], self._offsets[examples + 1]
        width = self._width(self._longest(examples))
        # Any id will do for padding; 0 is one in every vocabulary.
        input_ids = np.zeros((len(examples), width), dtype=np.int64)
        targets = np.full((len(examples), width), NO_TARGET, dtype=np.int64)
        for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            input_ids[row, : stop - start] = self._tokens[start:stop]
            targets[row, : stop - start] = self._targets[start:stop]
        return MicroBatch(torch.from_numpy(input_ids), torch.from_numpy(targets))


def _counts_of(directory: Path, split: str) -> tuple[dict[str, Any], dict[str, int]]:
    """A prepared folder's description, and the counts of one of its splits."""
    meta = _meta_of(directory)
    if split not in meta["splits"]:
        raise DatasetError(f'{directory} has no split "{split}", only {sorted(meta["splits"])}')
    return meta, meta["splits"][split]


def _map(path: Path, dtype: type[np.generic], size: int) -> npt.NDArray[Any]:
    """A file of `size` numbers, mapped into memory."""
    expected = size * np.dtype(dtype).itemsize
    if not path.is_file() or path.stat().st_size != expected:
        raise DatasetError(f"{path} is missing or not {expected} bytes long; prepare the dataset again")
    try:
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:  # the planner's process may map only so much
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
    """The widths of a job's micro-batches, from the lengths of its examples alone: the tokens may be larger than what
    the planner's process may map. `directory`: a folder that `windlass.engine.data.prepare` wrote; see
    `ExampleOrder.mean_widths` for the rest.

    Raises:
        DatasetError: there is no such folder, or it is incomplete.
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
