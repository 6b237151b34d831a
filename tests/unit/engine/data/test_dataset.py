import errno
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.engine.folders import make_tokenizer, make_tokenizer_folder
from windlass.engine.data.dataset import DatasetError, MicroBatch, PreparedDataset, example_lengths
from windlass.engine.data.examples import FORMAT_VERSION
from windlass.engine.data.tokenize import prepare

NUM_EXAMPLES = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose example i has i+1 letters: as many inputs and targets."""
    root = tmp_path_factory.mktemp("dataset")
    (root / "train.jsonl").write_text("".join(json.dumps({"text": "z" * (i + 1)}) + "\n" for i in range(NUM_EXAMPLES)))
    (root / "valid.jsonl").write_text("".join(json.dumps({"text": "q" * (i + 1)}) + "\n" for i in range(5)))
    prepare(
        model_dir=make_tokenizer_folder(root / "model", make_tokenizer()),
        training_file=root / "train.jsonl",
        validation_file=root / "valid.jsonl",
        sequence_length=10,
        output_dir=root / "out",
    )
    return root / "out"


def lengths(batches: list[MicroBatch]) -> list[int]:
    return [int(row.sum()) for batch in batches for row in batch.targets != -100]


def test_sizes(folder: Path) -> None:
    train = PreparedDataset.open(folder, "train")
    assert train.num_examples == NUM_EXAMPLES
    assert train.num_targets == sum(range(1, 11)) + 10  # the last example was cut
    assert [train.steps_per_epoch(n) for n in (1, 4, 11, 50)] == [11, 3, 1, 1]
    assert PreparedDataset.open(folder, "validation").num_examples == 5


def test_an_epoch_holds_every_example_once(folder: Path) -> None:
    train = PreparedDataset.open(folder, "train")
    for epoch in range(3):
        steps = [train.batch(3 * epoch + i, 4, 2, seed=7) for i in range(3)]
        assert [len(lengths(step)) for step in steps] == [4, 4, 3]
        assert sorted(n for step in steps for n in lengths(step)) == [*range(1, 11), 10]
        assert sum(batch.num_targets for step in steps for batch in step) == train.num_targets


def test_the_order_depends_on_seed_and_step_alone(folder: Path) -> None:
    train, again = PreparedDataset.open(folder, "train"), PreparedDataset.open(folder, "train")
    orders = [lengths(train.batch(step, 11, 1, seed)) for step, seed in ((0, 1), (1, 1), (0, 2))]
    assert len({tuple(order) for order in orders}) == 3
    # In reverse and without the earlier steps, as after a resume.
    assert lengths(again.batch(1, 11, 1, 1)) == orders[1]
    assert lengths(again.batch(0, 11, 1, 1)) == orders[0]


def test_no_microbatch_is_larger_than_the_largest(folder: Path) -> None:
    train = PreparedDataset.open(folder, "train")
    assert train.largest_shapes(7, 3) == [(3, 10), (2, 10), (2, 10)]
    assert train.largest_shapes(50, 20) == [(1, 10)] * NUM_EXAMPLES
    assert train.largest_shapes(11, 1) == [tuple(train.batch(0, 11, 1, seed=3)[0].input_ids.shape)]


@pytest.mark.parametrize(("batch_size", "num_microbatches", "num_steps"), [(4, 2, 7), (5, 3, 2), (11, 1, 1)])
def test_mean_widths_are_those_of_the_steps_batches(
    folder: Path, batch_size: int, num_microbatches: int, num_steps: int
) -> None:
    train = PreparedDataset.open(folder, "train")
    steps = [train.batch(step, batch_size, num_microbatches, seed=3) for step in range(num_steps)]
    shapes = [microbatch.input_ids.shape for step in steps for microbatch in step]
    num_rows = num_steps * num_microbatches * -(-batch_size // num_microbatches)
    mean, mean_square = train.mean_widths(batch_size, num_microbatches, 3, num_steps=num_steps)
    assert mean == pytest.approx(sum(rows * width for rows, width in shapes) / num_rows)
    assert mean_square == pytest.approx(sum(rows * width**2 for rows, width in shapes) / num_rows)


def test_mean_widths_of_a_long_job_are_those_of_its_first_steps(folder: Path) -> None:
    train = PreparedDataset.open(folder, "train")
    sampled = train.mean_widths(1, 1, 3, num_steps=10_000, max_steps=5)
    assert sampled == train.mean_widths(1, 1, 3, num_steps=5) != train.mean_widths(1, 1, 3, num_steps=6)


def test_example_lengths_know_both_splits(folder: Path) -> None:
    found = example_lengths(folder, batch_size=11, num_microbatches=1, seed=3, num_steps=2)
    assert (found.longest, found.mean, found.mean_square) == (10, 10.0, 100.0)
    assert (found.longest_validation, found.num_validation_examples) == (8, 5)
    with pytest.raises(DatasetError, match="not a prepared dataset"):
        example_lengths(folder / "none", batch_size=1, num_microbatches=1, seed=3, num_steps=1)


def test_example_lengths_are_found_without_the_tokens(folder: Path, tmp_path: Path) -> None:
    found = example_lengths(folder, batch_size=11, num_microbatches=1, seed=3, num_steps=2)
    without = shutil.copytree(folder, tmp_path / "without", ignore=shutil.ignore_patterns("*.tokens", "*.targets"))
    assert example_lengths(without, batch_size=11, num_microbatches=1, seed=3, num_steps=2) == found


def test_microbatches_are_contiguous_parts_and_never_empty(folder: Path) -> None:
    train = PreparedDataset.open(folder, "train")
    whole = lengths(train.batch(0, 5, 1, 3))
    for num_microbatches, sizes in ((2, [3, 2]), (5, [1] * 5), (8, [1] * 5)):
        parts = train.batch(0, 5, num_microbatches, 3)
        assert [len(part.input_ids) for part in parts] == sizes
        assert lengths(parts) == whole


def test_rows_are_padded_on_the_right_to_a_multiple_of_eight_or_the_sequence_length(folder: Path) -> None:
    train = PreparedDataset.open(folder, "train")
    for step in range(NUM_EXAMPLES):
        (batch,) = train.batch(step, 1, 1, 5)
        (num,) = lengths([batch])
        assert batch.input_ids.shape == batch.targets.shape == (1, 8 if num <= 8 else 10)
        assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
        letter = batch.input_ids[0, 0]
        assert batch.input_ids[0].tolist() == [letter] * num + [0] * (batch.input_ids.shape[1] - num)
        if num < 10:  # not cut: ends with the end-of-text token
            assert batch.targets[0, num - 1] == 2
        assert (batch.targets[0, num:] == -100).all()


def test_evaluation_keeps_the_files_order(folder: Path) -> None:
    validation = PreparedDataset.open(folder, "validation")
    batches = list(validation.evaluation_batches(2))
    assert [len(batch.input_ids) for batch in batches] == [2, 2, 1]
    assert lengths(batches) == [1, 2, 3, 4, 5]


def test_bad_arguments_are_refused(folder: Path) -> None:
    train = PreparedDataset.open(folder, "train")
    with pytest.raises(ValueError, match="num_microbatches"):
        train.batch(0, 1, 0, 0)
    with pytest.raises(ValueError, match="batch_size"):
        train.batch(0, 0, 1, 0)


def test_a_folder_that_is_no_dataset_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not a prepared dataset"):
        PreparedDataset.open(tmp_path, "train")
    with pytest.raises(DatasetError, match='no split "test"'):
        PreparedDataset.open(folder, "test")
    meta = json.loads((folder / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DatasetError, match=r"train\.tokens is missing"):
        PreparedDataset.open(tmp_path, "train")
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"version": 0}))
    with pytest.raises(DatasetError, match="format 0"):
        PreparedDataset.open(tmp_path, "train")


def test_open_of_a_data_set_that_the_process_may_not_map_is_an_error_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner has little address space. Without the data it makes no plan, and the job continues."""
    for kind, numel, itemsize in (("tokens", 1, 4), ("targets", 1, 4), ("offsets", 2, 8)):
        (tmp_path / f"train.{kind}").write_bytes(bytes(numel * itemsize))
    counts = {"num_examples": 1, "num_tokens": 1, "num_targets": 1}
    meta = {"version": FORMAT_VERSION, "sequence_length": 8, "splits": {"train": counts}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("windlass.engine.data.dataset.np.memmap", refuse)
    with pytest.raises(DatasetError, match="cannot be mapped into memory"):
        PreparedDataset.open(tmp_path, "train")
