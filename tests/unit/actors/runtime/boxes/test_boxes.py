"""An attempt over boxes that are processes of their own: the bits of one box, and an end for every failure."""

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.stage_runs import STAGES, run
from tests.support.actors.whole_jobs import Run, grouped, job
from tests.support.storage.links import quick
from tests.support.training import boxes_of, has_direct_io, leftovers_of
from tests.unit.actors.parity.boxes.test_linked_stages import ends
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import Message, OfferSpan, Phase, StoreCommitted
from windlass.actors.runtime.boxes.box_link import LinkEnd
from windlass.actors.runtime.boxes.first_box import BoxFailedError
from windlass.actors.runtime.boxes.local_boxes import run_local_box
from windlass.actors.scheduler import ActorLostError
from windlass.storage.ids import ActorName, Attempt, Precision

_WAIT_S = 60.0
CHANGES: dict[str, Any] = {"precision": Precision.BF16, "clip_norm": 0.5, "total_steps": 4, "tied": True}


def _serve(specs: Sequence[JobSpec], box: int, end: LinkEnd, dies_at: Callable[[ActorName, Message], bool]) -> None:
    def look(to: ActorName, message: Message) -> None:
        if dies_at(to, message):
            os.kill(os.getpid(), signal.SIGKILL)

    direct = has_direct_io(Path(specs[box].model_dir))
    with suppress(ActorLostError):  # the first box is lost, which its test expects
        run_local_box(specs, box, end, direct=direct, on_message=look)


def never(to: ActorName, message: Message) -> bool:
    return False


def in_backward(to: ActorName, message: Message) -> bool:
    return isinstance(message, OfferSpan) and (message.step, message.crossing.phase) == (2, Phase.BACKWARD)


def in_commit(to: ActorName, message: Message) -> bool:
    """The SSD has the step, and the first box never learns of it."""
    return isinstance(message, StoreCommitted) and message.step == 3


def as_the_first_box_sees(specs: Sequence[JobSpec]) -> list[JobSpec]:
    """The specifications with which the first box begins: of the other boxes it knows no paths and no SSDs."""
    nowhere = dict.fromkeys(("model_dir", "layout_file", "dataset_dir", "job_dir", "output_dir", "arena_dir"), "/none")
    first, *others = specs
    return [first, *(dataclasses.replace(each, ssd_dirs=first.ssd_dirs, **nowhere) for each in others)]


def train_apart(
    root: Path, specs: Sequence[JobSpec], dies_at: Callable[[ActorName, Message], bool] = never
) -> dict[str, Any]:
    """Runs the first box here, and the others in processes that `dies_at` may kill."""
    spawn = multiprocessing.get_context("spawn")
    # A process that starts has PyTorch to load, and a busy machine may give it no time for long.
    first, *others = ends(root, len(specs), settings=quick(silence_s=30.0, connect_s=120.0))
    processes = [
        spawn.Process(target=_serve, args=(specs, box, end, dies_at)) for box, end in enumerate(others, start=1)
    ]
    for process, end in zip(processes, others, strict=True):
        process.start()
        end.listener.close()
    try:
        outcome = run_local_box(as_the_first_box_sees(specs), 0, first, direct=has_direct_io(root))
        assert outcome is not None
        for process in processes:
            process.join(_WAIT_S)
        assert {each.exitcode for each in processes} == {0 if dies_at is never else -signal.SIGKILL}
        return outcome
    finally:
        for process in processes:
            process.join(_WAIT_S)
            process.kill()  # if it hangs


def specs_of(spec: JobSpec, division: str, ranks: tuple[int, ...] = ()) -> list[JobSpec]:
    return boxes_of(grouped(spec, 1), STAGES[division], ranks)


@pytest.mark.long
@pytest.mark.parametrize(("division", "ranks"), [("2-3", ()), ("2-1-2", ()), ("2-3", (2, 1)), ("2-3", (1, 2))])
def test_boxes_that_are_processes_have_the_bits_of_one(tmp_path: Path, division: str, ranks: tuple[int, ...]) -> None:
    """Also if one of them has two GPU workers, and the other one has one."""
    one = run(tmp_path / "one", **CHANGES)
    spec = job(tmp_path / "apart", lanes=1, **CHANGES)
    specs = specs_of(spec, division, ranks)
    specs[1] = dataclasses.replace(specs[1], ssd_dirs=specs[1].ssd_dirs[:1])
    assert train_apart(tmp_path / "links", specs)["status"] == "succeeded"
    Run.of(spec).assert_equals(one)
    assert [leftovers_of(each) for each in specs] == [[]] * len(specs)


@pytest.mark.long
@pytest.mark.parametrize("dies_at", [in_backward, in_commit])
def test_a_box_that_is_killed_interrupts_the_attempt_and_the_next_one_goes_on(
    tmp_path: Path, dies_at: Callable[[ActorName, Message], bool]
) -> None:
    one = run(tmp_path / "one", **CHANGES)
    spec = job(tmp_path / "apart", lanes=1, **CHANGES)
    outcome = train_apart(tmp_path / "links", specs_of(spec, "2-3"), dies_at)
    assert (outcome["status"], outcome["error"]["code"]) == ("interrupted", "process_lost")
    assert "box 'east'" in outcome["error"]["message"]
    again = dataclasses.replace(spec, attempt=Attempt(2))
    assert train_apart(tmp_path / "again", specs_of(again, "2-3"))["status"] == "succeeded"
    Run.of(spec).assert_equals(one)


@pytest.mark.long
def test_a_box_that_cannot_plan_its_part_says_why(tmp_path: Path) -> None:
    first, other = specs_of(job(tmp_path / "apart", lanes=1, **CHANGES), "2-3")
    with pytest.raises(BoxFailedError, match=r"box 'east': the job needs .* of host memory") as failed:
        train_apart(tmp_path / "links", [first, dataclasses.replace(other, host_memory_nbytes=4096)])
    assert failed.value.code == "does_not_fit"
    assert leftovers_of(first) == leftovers_of(other) == []
