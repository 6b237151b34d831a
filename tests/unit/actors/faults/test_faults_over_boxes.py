"""Faults at every message of a job over three boxes: the attempt ends on all of them, and the next one goes on.

The boxes are in one process, with a double between all actors and links. `test_fault_matrix.py` has one box, and more
kinds of faults.
"""

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.faults import Double, Fault, FaultKind, double_between_actors
from tests.support.actors.stage_runs import STAGES, run_attempt, train
from tests.support.actors.whole_jobs import grouped, job
from tests.support.training import boxes_of
from tests.unit.actors.faults.test_fault_matrix import model_of, numbers_of
from windlass.actors.job import box_of
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import (
    BlockComputed,
    BlockUpdated,
    ChunkIoDone,
    CommitDecided,
    CommitStore,
    ComputeBlock,
    ExportModel,
    ExportProgressed,
    GradOffloaded,
    GradReady,
    GradSlotsReleased,
    KernelChosen,
    LoadModel,
    LoadProgressed,
    MemoryReported,
    Message,
    ModelExported,
    ModelKernelsChosen,
    ModelLoaded,
    OfferParams,
    OfferSpan,
    OfferTaken,
    ParamsArrived,
    PullSpan,
    ReadChunks,
    RequestParams,
    SpanPulled,
    SpansReported,
    StoreCommitted,
    UpdateStep,
    WriteChunks,
)
from windlass.actors.scheduler import INTERRUPTED
from windlass.storage.ids import ActorName, Attempt, Precision

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

_BOXES = STAGES["2-1-2"]
# With a tied embedding, so that its params and their gradient cross, too.
_CHANGES: dict[str, Any] = {"precision": Precision.BF16, "clip_norm": 0.5, "total_steps": 4, "evaluate_every": 2}
# Seconds; the longer one is used if a slow machine made the attempt stall before its fault.
_DEADLINES_S = (5.0, 25.0)
_NO_DEADLINE_S = 120.0
_TO_ACTORS = (
    ChunkIoDone,
    CommitDecided,
    CommitStore,
    ComputeBlock,
    ExportModel,
    GradOffloaded,
    GradSlotsReleased,
    LoadModel,
    OfferParams,
    OfferSpan,
    OfferTaken,
    ParamsArrived,
    PullSpan,
    ReadChunks,
    RequestParams,
    SpanPulled,
    UpdateStep,
    WriteChunks,
)
# In one process, nothing can see the scheduler itself break.
_TO_SCHEDULER = (
    BlockComputed,
    BlockUpdated,
    ExportProgressed,
    GradReady,
    KernelChosen,
    LoadProgressed,
    MemoryReported,
    ModelExported,
    ModelKernelsChosen,
    ModelLoaded,
    SpansReported,
    StoreCommitted,
)
# Each with the place of the receiver among all that get such messages: of the first box, or of the last one.
_CASES = [
    *((message, kind, -1) for message in _TO_ACTORS for kind in (FaultKind.LOST, FaultKind.BREAKS)),
    *((message, FaultKind.LOST, 0) for message in (*_TO_ACTORS, *_TO_SCHEDULER)),
]


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """The results of an undisturbed job."""

    numbers: set[tuple[int, str, float]]
    model: bytes
    counts: Counter[tuple[ActorName, type[Message]]]  # by receiver


def spec_of(root: Path, deadline_s: float) -> JobSpec:
    return dataclasses.replace(grouped(job(root, lanes=1, tied=True, **_CHANGES), 1), deadline_s=deadline_s)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Undisturbed]:
    found: list[Undisturbed] = []

    def get() -> Undisturbed:
        if not found:
            spec = spec_of(tmp_path_factory.mktemp("undisturbed"), _NO_DEADLINE_S)
            with double_between_actors() as double:
                train(spec, _BOXES)
            counts = Counter((to, type(message)) for to, message in double.delivered)
            found.append(Undisturbed(numbers=numbers_of(spec), model=model_of(spec), counts=counts))
        return found[0]

    return get


def disturbed(spec: JobSpec, fault: Fault) -> tuple[dict[str, Any], Double]:
    """Runs an attempt with a fault. Returns its outcome, and the double. Checks that no thread is left."""
    before = set(threading.enumerate())
    with double_between_actors(fault) as double:
        outcome = run_attempt(*boxes_of(spec, _BOXES))
    assert set(threading.enumerate()) <= before
    return outcome, double


def test_every_message_of_a_job_over_boxes_has_its_cases(undisturbed: Callable[[], Undisturbed]) -> None:
    assert {message for _, message in undisturbed().counts} == {*_TO_ACTORS, *_TO_SCHEDULER}


@pytest.mark.parametrize(
    ("message", "kind", "place"),
    [pytest.param(*case, id=f"{case[0].__name__} {case[1]}{', last box' * (case[2] < 0)}") for case in _CASES],
)
def test_fault_ends_the_attempt_on_all_boxes_and_the_next_one_goes_on(
    tmp_path: Path, message: type[Message], kind: FaultKind, place: int, undisturbed: Callable[[], Undisturbed]
) -> None:
    expected = undisturbed()
    receivers = sorted((to for to, sent in expected.counts if sent is message), key=lambda name: (box_of(name), name))
    to = receivers[place]
    nth = 1 + expected.counts[to, message] // 2
    for deadline_s in _DEADLINES_S:
        spec = spec_of(tmp_path / f"{deadline_s:g}", deadline_s)
        outcome, double = disturbed(spec, Fault(to=to, message=message, nth=nth, kind=kind))
        if double.hit is not None:
            break
    assert double.hit is not None, outcome
    if outcome["status"] == "succeeded":
        assert kind is FaultKind.LOST
    else:
        assert outcome["status"] == INTERRUPTED, outcome
        assert outcome["error"]["message"]
        train(dataclasses.replace(spec, attempt=Attempt(2), deadline_s=_NO_DEADLINE_S), _BOXES)
    assert numbers_of(spec) == expected.numbers
    assert model_of(spec) == expected.model
