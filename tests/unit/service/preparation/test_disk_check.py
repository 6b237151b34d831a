"""A job's output fits on the disk, or the job is refused before it trains."""

from typing import Any

import pytest

from tests.support.service.dispatcher_stage import PREPARED, Stage
from windlass.service.preparation import disk_check as model_room
from windlass.storage.sql.job_status import JobStatus

GIB = 1024**3
# 2 GiB as a model in bf16, and 28 GiB as states.
SIZED = {**PREPARED, "check_model": {"ok": True, "num_params": GIB}}


def prepare(stage: Stage, **windlass: Any) -> str:
    job_id = stage.submit(**windlass)
    stage.tick()
    stage.preparations[-1].ending = SIZED
    stage.tick()
    return job_id


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """GiB that are free on the home's disk."""
    found = [0.0]
    monkeypatch.setattr(model_room, "directory_free_nbytes", lambda _: int(found[0] * GIB))
    return found


@pytest.fixture
def _ssds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the SSDs on other disks than the home's."""
    monkeypatch.setattr(model_room, "_share_beside", lambda *_: 0.0)


@pytest.mark.usefixtures("_ssds_apart")
@pytest.mark.parametrize(("precision", "nbytes"), [("bf16", 2), ("fp32", 4)])
def test_a_job_whose_model_does_not_fit_is_refused(
    stage: Stage, free: list[float], precision: str, nbytes: int
) -> None:
    free[0] = nbytes - 0.5
    job = stage.job(prepare(stage, precision=precision))
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert job.error["code"] == "does_not_fit"
    told = f"the model that the job makes takes {nbytes}.00 GiB; {nbytes - 0.5:.2f} GiB are free"
    assert job.error["message"].startswith(told)
    free[0] = nbytes
    assert stage.status(prepare(stage, precision=precision)) is not JobStatus.FAILED


def test_states_on_the_same_disk_count_as_well(stage: Stage, free: list[float]) -> None:
    free[0] = 29.0
    job = stage.job(prepare(stage))
    assert job.error is not None
    assert "takes 2.00 GiB, beside 28.00 GiB of states on the same disk; 29.00 GiB are free" in job.error["message"]
    free[0] = 30.0
    assert stage.status(prepare(stage)) is not JobStatus.FAILED


@pytest.mark.usefixtures("_ssds_apart")
@pytest.mark.parametrize(
    ("windlass", "num_kept"),
    [
        ({}, 0),
        ({"checkpoint_every": 1}, 3),  # of 4 steps; the last one's is the model
        ({"checkpoint_every": 2}, 1),
        ({"checkpoint_every": 1, "keep_checkpoints": 2}, 2),
        ({"checkpoint_every": 1, "keep_checkpoints": 9}, 3),
        ({"checkpoint_minutes": 1.0}, 0),
        ({"checkpoint_minutes": 1.0, "keep_checkpoints": 2}, 2),
        ({"keep_best": True}, 1),
        ({"final_model": "best", "checkpoint_every": 2}, 2),
    ],
)
def test_checkpoints_that_do_not_fit_are_a_warning(
    stage: Stage, free: list[float], windlass: dict[str, Any], num_kept: int
) -> None:
    room = 2.0 * (1 + num_kept)
    free[0] = room
    fits = prepare(stage, **windlass)
    free[0] = room - 0.1 if num_kept else room
    does_not = prepare(stage, **windlass)
    told = [[each for each in stage.messages(job_id) if "checkpoints take" in each] for job_id in (fits, does_not)]
    assert JobStatus.FAILED not in (stage.status(fits), stage.status(does_not))
    assert told[0] == []
    assert len(told[1]) == bool(num_kept)
    assert all(each.startswith(f"the model and up to {num_kept} checkpoints take {room:.2f} GiB; ") for each in told[1])
