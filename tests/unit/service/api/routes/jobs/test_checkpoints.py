"""The list of checkpoints in the API's format, and exports of any of them."""

import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, make_model
from windlass.actors.job.journal import JournalRecord
from windlass.service.cli import jobs as cli_jobs
from windlass.service.cli.errors import CommandError
from windlass.service.installation.settings import Settings
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.journal_import import import_journal

JOBS = "/v1/fine_tuning/jobs"


def run_job(client: TestClient, file_id: str, steps: range, *, attempt: int = 1) -> str:
    """A running job that has reported checkpoints at these steps."""
    job_id: str = client.post(JOBS, json={"model": "tiny", "training_file": file_id}).json()["id"]
    with context_of(client).database.write() as session:
        jobs = JobRepository(session)
        jobs.transition(job_id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="")
        jobs.transition(job_id, JobStatus.QUEUED, JobStatus.RUNNING, message="", attempt=attempt)
    tell(client, job_id, steps, attempt=attempt)
    return job_id


def tell(client: TestClient, job_id: str, steps: range, *, attempt: int, **about: Any) -> None:
    records = [checkpoint(job_id, step, seq, attempt, **about) for seq, step in enumerate(steps, start=1)]
    with context_of(client).database.write() as session:
        import_journal(session, job_id, attempt, records)


def checkpoint(job_id: str, step: int, seq: int, attempt: int, **about: Any) -> JournalRecord:
    model = f"ft:tiny::{job_id.removeprefix('ftjob-')[:12]}-step-{step}"
    data = {"step_number": step, "fine_tuned_model_checkpoint": model, "path": f"/x/{step}", "reasons": ["interval"]}
    data |= {"metrics": {"step": step, "train_loss": 1 / step}, "nbytes": 7, **about}
    now_s = time.time()
    return JournalRecord(
        attempt=attempt, seq=seq, created_at=now_s, kind="checkpoint", level="info", message="written", data=data
    )


def page(client: TestClient, job_id: str, **params: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"{JOBS}/{job_id}/checkpoints", params=params).json()
    return found


def test_a_checkpoint_has_all_fields_of_the_contract(client: TestClient, file_id: str) -> None:
    job_id = run_job(client, file_id, range(5, 6))
    (found,) = page(client, job_id)["data"]
    assert found["id"].startswith("ftckpt-")
    assert found["created_at"] > 0
    assert found | {"id": "", "created_at": 0} == {
        "id": "",
        "object": "fine_tuning.job.checkpoint",
        "created_at": 0,
        "fine_tuned_model_checkpoint": f"ft:tiny::{job_id.removeprefix('ftjob-')[:12]}-step-5",
        "fine_tuning_job_id": job_id,
        "step_number": 5,
        "metrics": {"step": 5, "train_loss": 0.2},
        "windlass": {"reasons": ["interval"], "bytes": 7},
    }


def test_the_list_is_latest_first_in_pages_that_name_their_ends(client: TestClient, file_id: str) -> None:
    job_id, other = run_job(client, file_id, range(1, 13)), run_job(client, file_id, range(1, 2))
    first = page(client, job_id)
    assert [each["step_number"] for each in first["data"]] == list(range(12, 2, -1))  # ten by default
    assert (first["object"], first["has_more"]) == ("list", True)
    assert (first["first_id"], first["last_id"]) == (first["data"][0]["id"], first["data"][-1]["id"])
    rest = page(client, job_id, after=first["last_id"])
    assert ([each["step_number"] for each in rest["data"]], rest["has_more"]) == ([2, 1], False)
    exact = page(client, job_id, after=first["last_id"], limit=2)
    assert (exact["data"], exact["has_more"]) == (rest["data"], False)
    nothing = page(client, job_id, after=rest["last_id"])
    assert nothing == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
    elsewhere = page(client, other)["first_id"]
    for after in (elsewhere, "ftckpt-none"):
        response = client.get(f"{JOBS}/{job_id}/checkpoints", params={"after": after})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    for limit in (0, 1001):
        assert client.get(f"{JOBS}/{job_id}/checkpoints", params={"limit": limit}).status_code == 400


def test_a_checkpoint_that_a_later_attempt_makes_again_keeps_its_id(client: TestClient, file_id: str) -> None:
    job_id = run_job(client, file_id, range(1, 3))
    before = page(client, job_id)["data"]
    with context_of(client).database.write() as session:
        JobRepository(session).set_fields(job_id, attempt=2)
    tell(client, job_id, range(2, 3), attempt=2, metrics={"step": 2, "train_loss": 9.0})
    after = page(client, job_id)["data"]
    assert [each["id"] for each in after] == [each["id"] for each in before]
    assert after[0]["metrics"]["train_loss"] == 9.0


class StandInProgress:
    """Records its calls."""

    seen: list[tuple[int, int]]

    def __init__(self, *_: object, **__: object) -> None:
        self.total = 0

    def __enter__(self) -> "StandInProgress":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_task(self, _name: str, *, total: int) -> int:
        self.total = total
        return 0

    def update(self, _task: int, *, completed: int) -> None:
        self.seen.append((completed, self.total))


def test_any_checkpoint_can_be_exported_and_shows_how_far_it_is(
    client: TestClient,
    settings: Settings,
    file_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job_id = run_job(client, file_id, range(1, 4))
    models = [each["fine_tuned_model_checkpoint"] for each in page(client, job_id)["data"]]
    for model in models:
        make_model(settings.fine_tuned_dir / model)
    monkeypatch.setattr(cli_jobs, "Progress", StandInProgress)
    for index, model in enumerate(models):
        StandInProgress.seen = []
        destination = tmp_path / "exports" / str(index)
        cli_jobs.export(model, destination, home=settings.home)
        copied, source = sorted(destination.iterdir()), settings.fine_tuned_dir / model
        assert [path.name for path in copied] == ["config.json", "model.safetensors"]
        assert all(path.read_bytes() == (source / path.name).read_bytes() for path in copied)
        assert not any(path.samefile(source / path.name) for path in copied)
        done, total = StandInProgress.seen[-1]
        assert done == total == sum(path.stat().st_size for path in copied)
        assert StandInProgress.seen == sorted(StandInProgress.seen)
        assert capsys.readouterr().out == f"{destination}\n"
    with pytest.raises(CommandError, match="exists already"):
        cli_jobs.export(models[0], tmp_path / "exports" / "0", home=settings.home)
    with pytest.raises(CommandError, match=f"there is no model .*; did you mean {models[0]}"):
        cli_jobs.export(f"{models[0]}9", tmp_path / "none", home=settings.home)
