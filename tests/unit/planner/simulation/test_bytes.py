"""A simulated job moves as many bytes as a real job, of each kind, for each block and step."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulator.cases import CASES, NUM_STEPS, DecidedNbytes, compare
from tests.support.training import has_direct_io
from windlass.actors.messages import SpanKind

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


def _without_races(nbytes: DecidedNbytes) -> DecidedNbytes:
    """The bytes without reads of activations.

    With fast SSDs, some activations are needed again while they are still in a buffer.
    """
    for (kind, block, step), read in nbytes.items():
        if kind is SpanKind.READ_ACTIVATIONS:
            assert read <= nbytes[SpanKind.WRITE_ACTIVATIONS, block, step]
    return {key: each for key, each in nbytes.items() if key[0] is not SpanKind.READ_ACTIVATIONS}
