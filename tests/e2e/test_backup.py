"""An installation is backed up while its job trains, and restored twice: with the states on its SSDs, and without."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.installation import Installation, free_port, make_tiny_model, write_examples

# Enough epochs that the job trains until the test ends it.
ENDLESS = ("--epochs", "1000", "--batch-size", "1", "--sequence-length", "32", "--precision", "fp32")
JOBS = "/v1/fine_tuning/jobs"


def wait_for(installation: Installation, job_id: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Waits until `reached` is true for the job, and returns the job."""
    deadline = time.monotonic() + 400
    with httpx.Client(base_url=installation.url, trust_env=False) as client:
        while not reached(job := client.get(f"{JOBS}/{job_id}").json()):
            assert time.monotonic() < deadline, f"{job}{installation.logs()}"
            time.sleep(0.2)
    return dict(job)


def is_past(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda job: job["windlass"]["step"] > step


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_job_that_was_not_finished_goes_on_where_its_states_are_and_else_says_what_it_lacks(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "none")  # compiling kernels takes longer than the rest of the test
    monkeypatch.setenv("WINDLASS_SSD_DIRS", f"{tmp_path}/ssd-a,{tmp_path}/ssd-b")
    make_tiny_model(installation.home / "models" / "tiny")
    installation.home.chmod(0o700)
    write_examples(tmp_path / "train.jsonl", 200)
    installation.ok("up", "--detach")
    job_id = installation.ok("submit", "tiny", str(tmp_path / "train.jsonl"), *ENDLESS)
    wait_for(installation, job_id, is_past(3))
    installation.ok("backup", str(tmp_path / "backup"))
    # After the backup the job continues in another attempt, so the SSDs have a later state than the backup.
    installation.ok("pause", job_id)
    wait_for(installation, job_id, lambda job: job["status"] == "paused")
    installation.ok("resume", job_id)
    wait_for(installation, job_id, lambda job: job["status"] == "running" and job["windlass"]["attempt"] == 2)
    reached = wait_for(installation, job_id, is_past(wait_for(installation, job_id, is_past(0))["windlass"]["step"]))
    installation.ok("pause", job_id)
    wait_for(installation, job_id, lambda job: job["status"] == "paused")
    installation.ok("down")

    home = tmp_path / "restored"
    # The content of the installation, as its own command prints it.
    restored = Installation(home=home, port=free_port())
    try:
        assert f"not finished: job {job_id}" in restored.ok("restore", str(tmp_path / "backup"))
        restored.ok("up", "--detach")
        job = wait_for(restored, job_id, is_past(reached["windlass"]["step"]))
        assert job["windlass"]["attempt"] == 3
        assert "Resuming after step" in restored.ok("logs", job_id)
        restored.ok("cancel", job_id)
        wait_for(restored, job_id, lambda job: job["status"] == "cancelled")
        restored.ok("delete", job_id)
        assert "no jobs yet" in restored.ok("jobs")
    finally:
        restored.end()

    monkeypatch.setenv("WINDLASS_SSD_DIRS", f"{tmp_path}/ssd-c")
    bare = Installation(home=tmp_path / "bare", port=free_port())
    try:
        bare.ok("restore", str(tmp_path / "backup"))
        bare.ok("up", "--detach")
        wait_for(bare, job_id, lambda job: job["status"] == "paused")
        told = bare.ok("logs", job_id)
        assert "none of its SSDs" in told
        assert "submit the job again" in told
        # The job's files are restored.
        (file_id,) = [each for each in bare.ok("files").split() if each.startswith("file-")]
        again = bare.ok("submit", "tiny", file_id, *ENDLESS)
        wait_for(bare, again, is_past(0))
        bare.ok("cancel", again)
        wait_for(bare, again, lambda job: job["status"] == "cancelled")
    finally:
        bare.end()
