"""A simulated job moves as many bytes as a real job, of each kind, for each block and step."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulator.cases import CASES, NUM_STEPS, DecidedNbytes, compare
from tests.support.training import has_direct_io
from windlass.actors.messages import SpanKind
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import Precision

_MOVES = {
    "swapped, the way out": {SpanKind.COPY_ACTIVATIONS_OUT, SpanKind.COPY_ACTIVATIONS_IN},
    "inputs swapped, both": {SpanKind.COPY_ACTIVATIONS_OUT, SpanKind.COPY_ACTIVATIONS_IN},
    "swapped, the SSDs": {SpanKind.WRITE_ACTIVATIONS, SpanKind.COPY_ACTIVATIONS_IN},
    "in pieces": {SpanKind.COPY_PARAMS_IN},
    "in pieces, graphs kept": {SpanKind.COPY_PARAMS_IN},
    "groups, the way in": {SpanKind.COPY_PARTIAL_OUT, SpanKind.COPY_PARTIAL_IN},
    "groups, the way out": {SpanKind.COPY_PARTIAL_OUT, SpanKind.COPY_PARTIAL_IN},
    "all of it": {SpanKind.WRITE_ACTIVATIONS, SpanKind.COPY_PARTIAL_IN, SpanKind.COPY_ACTIVATIONS_IN},
}
_QUICK = ("swapped, the SSDs", "groups, the way out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the models and tokens on which the jobs train."""
    return tmp_path_factory.mktemp("simulated")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.long) for name in _MOVES]
)
def test_simulated_jobs_move_the_same_bytes(folder: Path, name: str) -> None:
    found = compare(CASES[name].hurried(), folder, direct=has_direct_io(folder))
    real, simulated = (_without_races(run.nbytes) for run in (found.real, found.simulated))
    assert simulated == real
    kinds = {kind for kind, _, _ in found.real.nbytes}
    assert kinds >= _MOVES[name] | {SpanKind.COPY_PARAMS_IN, SpanKind.COPY_GRAD_OUT}
    assert {step for _, _, step in real} == set(range(2, NUM_STEPS))


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("groups, the way out", 2),
        pytest.param("groups, the way out", 4, marks=pytest.mark.long),
        pytest.param("groups, the way in", 2, marks=pytest.mark.long),
        pytest.param("in pieces", 2, marks=pytest.mark.long),
    ],
)
def test_simulated_ranks_move_the_same_bytes(folder: Path, name: str, num_ranks: int) -> None:
    case = CASES[name].hurried()
    placement = replace(case.placement, group_size=1)
    case = replace(case, placement=placement, num_ranks=num_ranks)
    found = compare(case, folder, direct=has_direct_io(folder))
    assert found.simulated.nbytes == found.real.nbytes
    assert {SpanKind.COPY_PARAMS_IN, SpanKind.COPY_PARTIAL_IN} <= {kind for kind, _, _ in found.real.nbytes}


@pytest.mark.short("4-2-2-True")
@pytest.mark.parametrize(
    ("lanes", "num_ranks", "group_size", "is_tied"),
    [
        (4, 2, 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(2, 1, 4, False), (2, 2, 2, False), (4, 4, 1, False), (1, 2, 1, True), (1, 3, 2, False)]
        ),
    ],
)
def test_gradients_in_pieces_move_the_same_bytes(
    folder: Path, lanes: int, num_ranks: int, group_size: int, is_tied: bool
) -> None:
    case = CASES["in pieces"].hurried()
    placement = replace(case.placement, group_size=group_size, streams_grads=True)
    case = replace(
        case, placement=placement, num_ranks=num_ranks, lanes=lanes, num_microbatches=4, is_tied=is_tied, clip_norm=1.0
    )
    found = compare(case, folder, direct=has_direct_io(folder))
    real, simulated = (_of_grads(run.nbytes) for run in (found.real, found.simulated))
    assert simulated == real
    assert {block for kind, block, _ in real if kind is SpanKind.COPY_PARTIAL_IN} >= {1, 2, 3}


@pytest.mark.parametrize(("num_microbatches", "group_size"), [(1, 1), pytest.param(4, 3, marks=pytest.mark.long)])
def test_sums_over_slices_of_the_head_move_the_same_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_microbatches: int, group_size: int
) -> None:
    """They are in fp32, and their gradient leaves in 16 bits. A micro-batch has 192 tokens or 48."""
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 20)
    case = CASES["in pieces"].hurried()
    placement = replace(case.placement, group_size=group_size, streams_grads=True, streams_ends=True)
    case = replace(case, placement=placement, num_microbatches=num_microbatches, precision=Precision.BF16)
    found = compare(case, folder, direct=has_direct_io(folder))
    real, simulated = (_of_grads(run.nbytes) for run in (found.real, found.simulated))
    assert simulated == real
    assert real[SpanKind.COPY_PARTIAL_IN, 4, 2] > real[SpanKind.COPY_GRAD_OUT, 4, 2] > 0


def _of_grads(nbytes: DecidedNbytes) -> DecidedNbytes:
    grads = {SpanKind.COPY_GRAD_OUT, SpanKind.COPY_PARTIAL_IN, SpanKind.COPY_PARTIAL_OUT}
    return {key: each for key, each in nbytes.items() if key[0] in grads}


def _without_races(nbytes: DecidedNbytes) -> DecidedNbytes:
    """The bytes without reads of activations.

    With fast SSDs, some activations are needed again while they are still in a buffer.
    """
    for (kind, block, step), read in nbytes.items():
        if kind is SpanKind.READ_ACTIVATIONS:
            assert read <= nbytes[SpanKind.WRITE_ACTIVATIONS, block, step]
    return {key: each for key, each in nbytes.items() if key[0] is not SpanKind.READ_ACTIVATIONS}
