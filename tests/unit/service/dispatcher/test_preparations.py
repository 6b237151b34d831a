"""Several jobs are prepared at the same time.

No owner's job delays another's, and each gives the reason of its wait.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.service.dispatcher_stage import PREPARED, Stage, StandInPreparation
from windlass.service.dispatcher.preparations import Preparations
from windlass.service.preparation.memory import PreparationMemory
from windlass.service.preparation.pipeline import Preparation
from windlass.service.preparation.sandbox.process import LimitedProcess
from windlass.service.preparation.steps import PreparationOrder, PreparationStep
from windlass.storage.sql.job_status import JobStatus

_SLOW = "import time; time.sleep(600)"


def _of(stage: Stage, job_id: str) -> StandInPreparation:
    return next(p for p in stage.preparations if p.order.work_dir.parent.name == job_id)


def _begun(stage: Stage) -> set[str]:
    return {p.order.work_dir.parent.name for p in stage.preparations}


def _put_file(stage: Stage, nbytes: int) -> None:
    with (stage.settings.files_dir / "file-train").open("wb") as file:
        file.truncate(nbytes)


@pytest.fixture(autouse=True)
def model_folder(stage: Stage) -> None:
    """Makes a model folder, so that nothing is downloaded."""
    (stage.settings.models_dir / "tiny").mkdir()


def test_two_jobs_are_prepared_side_by_side_on_four_cores_and_the_third_says_why_it_waits(stage: Stage) -> None:
    first, second, third = (stage.submit(owner="ann") for _ in range(3))
    stage.tick()
    assert _begun(stage) == {first, second}
    assert stage.job(third).waiting_reason == f"its turn to be prepared, after jobs {first}, {second}"
    _of(stage, first).ending = PREPARED
    stage.tick(2)
    assert _begun(stage) == {first, second, third}
    assert stage.job(third).waiting_reason is None


def test_another_owners_job_is_prepared_beside_all_of_one_owners(stage: Stage) -> None:
    own = [stage.submit(owner="ann") for _ in range(4)]
    stage.tick()
    other = stage.submit(owner="bob")
    stage.tick()
    assert not _of(stage, other).is_halted
    halted = [job_id for job_id in own if job_id in _begun(stage) and _of(stage, job_id).is_halted]
    assert halted == [own[1]], "it stands still meanwhile"
    assert stage.job(own[1]).waiting_reason == f"its turn to be prepared, after job {own[0]} and 1 job of others"
    assert stage.job(own[3]).waiting_reason == f"its turn to be prepared, after job {own[0]} and 1 job of others"
    _of(stage, other).ending = PREPARED
    stage.tick(2)
    assert not _of(stage, own[1]).is_halted


def test_waiting_for_ones_turn_is_one_event(stage: Stage) -> None:
    jobs = [stage.submit(owner="ann") for _ in range(4)]
    for job_id in jobs[:2]:
        stage.tick(2)
        _of(stage, job_id).ending = PREPARED
        stage.now += 10
    stage.tick(3)
    assert sum("its turn to be prepared" in message for message in stage.messages(jobs[3])) == 1


def test_a_job_that_is_paused_ends_its_preparation_and_another_gets_its_place(stage: Stage) -> None:
    first, second, third = (stage.submit(owner="ann") for _ in range(3))
    stage.tick()
    stage.request_pause(first)
    stage.tick()
    assert _of(stage, first).stopped
    assert _begun(stage) == {first, second, third}


def _real(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, code: str, memory: PreparationMemory | None = None
) -> dict[str, Preparation]:
    """Makes preparations of one real process each, by job."""
    made: dict[str, Preparation] = {}

    def prepare(order: PreparationOrder) -> Preparation:
        result = order.work_dir / "prepare_data.json"
        step = PreparationStep(
            name="prepare_data", command=(sys.executable, "-c", code, str(result)), result_path=result, timeout_s=60
        )
        job_id = order.work_dir.parent.name
        made[job_id] = Preparation([step], work_dir=order.work_dir)
        return made[job_id]

    ours = stage.dispatcher._preparations
    monkeypatch.setattr(ours, "_prepare", prepare)
    if memory is not None:
        monkeypatch.setattr(ours, "_memory", memory)
    return made


def _wait_for(stage: Stage, is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until_s, "it did not come to that"
        time.sleep(0.02)
        stage.now += 1.0
        stage.tick()


def _is_stopped(process: LimitedProcess | None) -> bool:
    assert process is not None
    return "State:\tT" in Path(f"/proc/{process.pid}/status").read_text()


def test_progress_and_time_are_told_and_gone_with_the_preparation(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"percent": 40, "line": 7, "file": "mine.jsonl"}
    code = f"import sys; open(sys.argv[1][:-5] + '.progress', 'w').write({json.dumps(told)!r}); {_SLOW}"
    _real(stage, monkeypatch, code)
    job_id = stage.submit(owner="ann")
    _wait_for(stage, lambda: (stage.job(job_id).preparation or {}).get("percent") == 40)
    found = stage.job(job_id).preparation
    assert found is not None
    assert found.pop("elapsed_s") > 0
    assert found == {"step": "prepare_data", **told}
    stage.request_pause(job_id)
    stage.tick()
    assert (stage.status(job_id), stage.job(job_id).preparation) == (JobStatus.PAUSED, None)


def test_the_process_of_one_that_stands_back_is_stopped_and_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _real(stage, monkeypatch, _SLOW)
    monkeypatch.setattr(stage.dispatcher._preparations, "_num_side_by_side", 1)
    _put_file(stage, 1000)
    large = stage.submit(owner="ann")
    stage.tick()
    other = stage.submit(owner="bob")
    _wait_for(stage, lambda: other in made and _is_stopped(made[large].process))
    assert not _is_stopped(made[other].process)
    stage.request_cancel(other)
    _wait_for(stage, lambda: not _is_stopped(made[large].process))
    stage.dispatcher.close()


def test_a_long_preparation_leaves_few_cores_to_a_job_that_starts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = stage.submit(owner="ann")
    stage.tick()
    monkeypatch.setattr(StandInPreparation, "computed_s", property(lambda self: 9.0 * (self is _of(stage, long))))
    stage.prepare_at_once(stage.submit(owner="bob"), PREPARED)
    stage.tick(2)
    assert _of(stage, long).is_halted
    assert stage.job(long).waiting_reason == "its turn to be prepared, after a job that starts"
    monkeypatch.setattr("windlass.service.dispatcher.queue._STARTING_S", 0.0)
    stage.tick()
    assert not _of(stage, long).is_halted


def test_a_preparation_of_lower_priority_leaves_few_cores_to_a_job_that_starts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower, same = stage.submit(owner="ann", priority=1), stage.submit(owner="cat")
    stage.prepare_at_once(stage.submit(owner="bob"), PREPARED)
    stage.tick(2)
    monkeypatch.setattr(stage.dispatcher._preparations, "_num_side_by_side", 3)
    stage.tick()
    assert str(stage.job(lower).waiting_reason).startswith("its turn to be prepared")
    assert not _of(stage, same).is_halted
    monkeypatch.setattr("windlass.service.dispatcher.queue._STARTING_S", 0.0)
    stage.tick()
    assert not _of(stage, lower).is_halted


def test_a_step_that_measures_is_never_stopped(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.dispatcher._preparations, "_num_side_by_side", 1)
    measuring = stage.submit(owner="ann")
    stage.tick()
    monkeypatch.setattr(StandInPreparation, "measures", property(lambda self: self is _of(stage, measuring)))
    other = stage.submit(owner="bob")
    stage.tick(2)
    assert other in _begun(stage)
    assert not _of(stage, measuring).is_halted


def test_a_preparation_waits_for_memory_and_says_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [0]
    memory = PreparationMemory(lambda: free[0], 0)
    monkeypatch.setattr(Preparations, "_is_box_free", lambda _self: False, raising=False)
    stage.dispatcher._preparations._is_box_free = lambda: False
    made = _real(stage, monkeypatch, _SLOW, memory)
    job_id = stage.submit(owner="ann")
    stage.tick()
    assert made[job_id].process is None
    assert str(stage.job(job_id).waiting_reason).startswith("memory for its preparation: 3.00 GiB needed, 0")
    free[0] = 1 << 34
    _wait_for(stage, lambda: made[job_id].process is not None)
    stage.tick()
    assert stage.job(job_id).waiting_reason is None
    stage.dispatcher.close()


@pytest.mark.parametrize("owner", ["ann", "bob"])
def test_one_that_waits_for_memory_does_not_hold_up_those_that_have_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    free_nbytes = [4 * 1024**3]
    memory = PreparationMemory(free_nbytes=lambda: free_nbytes[0], total_nbytes=8 * 1024**3)
    made = _real(stage, monkeypatch, _SLOW, memory)
    monkeypatch.setattr(stage.dispatcher._preparations, "_num_side_by_side", 1)
    first = stage.submit(owner="ann")
    _wait_for(stage, lambda: first in made and made[first].process is not None)
    made[first]._computed_s = 40.0  # so that any other goes first
    free_nbytes[0] = 0
    second = stage.submit(owner=owner)
    _wait_for(stage, lambda: second in made and made[second].waits_for_memory)
    stage.tick(2)
    assert not made[first].is_halted
    assert not _is_stopped(made[first].process)
    free_nbytes[0] = 16 * 1024**3
    _wait_for(stage, lambda: made[second].process is not None)
    stage.tick(2)
    assert made[first].is_halted, "it stands back for the one that has its memory now"
    assert not made[second].is_halted
    stage.dispatcher.close()
