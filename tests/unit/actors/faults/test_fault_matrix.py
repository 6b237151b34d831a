"""Faults at every message between actors: a named error in time, nothing left, and a next attempt that resumes.

The real actors run in one process, with a double between them. The next attempt gives the results of an undisturbed
job: same losses, same bytes of the model.
"""

import dataclasses
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.fault_cases import (
    MODES,
    ROWS,
    SSDS,
    WITHOUT_CASES,
    Case,
    conditions_of,
    full_product,
    quick_cases,
    spec_of,
)
from tests.support.actors.faults import BROKEN, Double, Fault, FaultKind, double_between_actors
from tests.support.training import has_direct_io, journal_of, leftovers_of, make_partition
from windlass.actors.job.context import GPU_WORKER, SCHEDULER
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import (
    CommitStore,
    LoadModel,
    Message,
    ModelLoaded,
    StoreCommitted,
    in_words,
    message_types,
)
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.scheduler.scheduler import INTERRUPTED
from windlass.storage.ids import ActorName, Attempt

# Seconds; a longer one is used if a slow machine made the attempt stall before its fault.
DEADLINES_S = (1.0, 5.0, 25.0)
NO_DEADLINE_S = 120.0
NUMBERS = ("train_loss", "valid_loss", "grad_norm", "trained_tokens")
# Seconds; only a hang takes that long.
pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """The results of an undisturbed job in one mode."""

    numbers: set[tuple[int, str, float]]
    model: bytes
    counts: Counter[tuple[ActorName, type[Message]]]  # by receiver
    begun: Counter[tuple[str, type[Message]]]  # by thread


def numbers_of(spec: JobSpec) -> set[tuple[int, str, float]]:
    """The numbers of all steps in the journal. A step that is trained again must repeat its numbers."""
    told = [record.data for record in journal_of(spec) if record.kind == "metrics"]
    return {(data["step"], name, data[name]) for data in told for name in NUMBERS if name in data}


def model_of(spec: JobSpec) -> bytes:
    return (Path(spec.output_dir) / "model.safetensors").read_bytes()


def attempt(spec: JobSpec) -> dict[str, Any]:
    return run_local(spec, partition=make_partition(spec), direct=has_direct_io(Path(spec.job_dir)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Undisturbed]:
    found: dict[str, Undisturbed] = {}

    def get(mode: str) -> Undisturbed:
        if mode not in found:
            spec = spec_of(tmp_path_factory.mktemp(mode), mode, NO_DEADLINE_S)
            with conditions_of(mode), double_between_actors() as double:
                assert attempt(spec)["status"] == "succeeded"
            counts = Counter((to, type(message)) for to, message in double.delivered)
            found[mode] = Undisturbed(numbers=numbers_of(spec), model=model_of(spec), counts=counts, begun=double.begun)
        return found[mode]

    return get


def test_every_message_has_its_cases() -> None:
    missing = set(message_types().values()) - {row.message for row in ROWS} - WITHOUT_CASES
    assert not missing, f"add rows to fault_cases.py for {missing}"


@pytest.mark.short("kept", "ranks", "swapped")
@pytest.mark.parametrize("mode", MODES)
def test_every_actor_takes_what_the_matrix_says(mode: str, undisturbed: Callable[[str], Undisturbed]) -> None:
    expected = {(to, row.message) for row in ROWS if mode in row.modes for to in row.to}
    assert set(undisturbed(mode).counts) == expected


# A ninth of the cases is fast enough: one of every nine, with a changing offset, because kinds of faults take turns.
QUICK = [
    pytest.param(case, id=str(case), marks=[pytest.mark.long] * (i % 9 != i // 9 % 9))
    for i, case in enumerate(quick_cases())
]
FULL = [pytest.param(case, id=f"{case}, full", marks=pytest.mark.long) for case in full_product()]


@pytest.mark.parametrize("case", QUICK + FULL)
def test_a_fault_ends_in_a_named_error_and_the_next_attempt_goes_on(
    tmp_path: Path, case: Case, undisturbed: Callable[[str], Undisturbed]
) -> None:
    expected = undisturbed(case.mode)
    kind, thread = case.row.message, case.row.thread
    count = expected.begun[f"{case.to} {thread}", kind] if thread else expected.counts[case.to, kind]
    fault = Fault(to=case.to, message=kind, nth=case.nth(count), kind=case.kind, thread=thread)
    with conditions_of(case.mode):
        for deadline_s in DEADLINES_S:
            spec = spec_of(tmp_path / f"{deadline_s:g}", case.mode, deadline_s)
            status, error, double = disturbed_attempt(spec, fault)
            if double.hit is not None:
                break
        assert double.hit is not None, error
        assert double.carrier is not None
        if status == "succeeded":
            assert not case.row.awaits(double.hit)
        else:
            assert status == INTERRUPTED
            assert_named(error, case, double.hit, double.carrier)
            again = dataclasses.replace(spec, attempt=Attempt(2), deadline_s=NO_DEADLINE_S)
            assert attempt(again)["status"] == "succeeded"
            assert_went_on_from_the_last_commit(spec, double)
    assert numbers_of(spec) == expected.numbers
    assert model_of(spec) == expected.model
    assert leftovers_of(spec) == []


def disturbed_attempt(spec: JobSpec, fault: Fault) -> tuple[str, str, Double]:
    """Runs an attempt with the fault; returns its status, its error and the double.

    Checks that no thread and no arena is left.
    """
    before = set(threading.enumerate())
    with double_between_actors(fault) as double:
        hung = ""
        try:
            attempt(spec)
        except TimeoutError as error:
            hung = str(error)
        if fault.kind is FaultKind.HANGS_THREAD and double.hit is not None:
            assert re.search(rf"{fault.to} .* end this process before the job goes on", hung)
        else:
            assert hung == ""
            assert set(threading.enumerate()) <= before
    await_end_of(set(threading.enumerate()) - before)
    assert not [path for path in Path(spec.arena_dir).iterdir() if spec.job in path.name]
    outcome = journal_of(spec)[-1]
    assert outcome.kind == "outcome"
    return outcome.data["status"], (outcome.data["error"] or {}).get("message", ""), double


def await_end_of(threads: set[threading.Thread]) -> None:
    """Waits for the end of threads that hung and were released."""
    until_s = time.monotonic() + NO_DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)


def assert_named(error: str, case: Case, hit: Message, carrier: Message) -> None:
    """Checks that the error names the actor, the step and, if there is one, the block and the message."""
    assert culprit(case.to, hit, carrier) in error
    assert re.search(r"step \d", error) or case.row.message in (LoadModel, ModelLoaded)
    if case.kind is FaultKind.BREAKS:
        at = r".*step \d.*" if case.row.is_call else re.escape(in_words(carrier))  # a call is made for another message
        assert re.search(rf"{BROKEN} \(at {at}\)", error)
    if case.kind is FaultKind.BREAKS_THREAD:
        assert re.search(rf"{BROKEN} \(at .*step {hit.step}\b", error)
    if re.search(r" block \d", in_words(hit)) and (hit is carrier or case.kind is not FaultKind.BREAKS):
        assert re.search(r"block \d", error)


def culprit(to: ActorName, hit: Message, carrier: Message) -> ActorName:
    """The actor to blame: the receiver of the message with the fault.

    If the scheduler is the receiver, the actor that should have sent it.
    """
    if to != SCHEDULER:
        return to
    return getattr(hit, "actor", None) or getattr(carrier, "actor", GPU_WORKER)


def assert_went_on_from_the_last_commit(spec: JobSpec, double: Double) -> None:
    """Checks the step from which the next attempt resumed.

    For a commit in flight, the SSDs may or may not have the record.
    """
    told, asked = Counter[int](), Counter[int]()
    for _, message in double.delivered:
        told[message.step] += isinstance(message, StoreCommitted)
        asked[message.step] += isinstance(message, CommitStore)
    first, last = (max((s for s, n in counts.items() if n == len(SSDS)), default=-1) for counts in (told, asked))
    texts = [record.message for record in journal_of(spec) if record.attempt == 2]
    resumed = [int(text.rpartition(" ")[2]) for text in texts if text.startswith("Resuming after step ")]
    assert first <= (resumed[0] if resumed else -1) <= last
