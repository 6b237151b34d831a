"""Jobs that fail, wait, are cancelled or block `windlass down`, as the user sees them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.installation import Installation, make_tiny_model, write_examples

# Enough epochs that the jobs train until the test ends them.
_ENDLESS = ("--epochs", "1000", "--batch-size", "1", "--sequence-length", "32", "--precision", "fp32")


def _wait_for(installation: Installation, job_id: str, reached: Callable[[dict[str, Any]], bool], what: str) -> str:
    """Waits until `reached` is true for the job, and returns the output of `windlass show`."""
    installation.await_job(job_id, reached, what)
    return " ".join(installation.ok("show", job_id).split())


def _wait_for_status(installation: Installation, job_id: str, status: str) -> str:
    shown = _wait_for(installation, job_id, lambda job: job["status"] == status, status)
    assert f"status {status}" in shown
    return shown


def _wait_for_step(installation: Installation, job_id: str) -> None:
    shown = _wait_for(installation, job_id, lambda job: job["windlass"]["step"] > 0, "a step")
    assert "last metrics Step" in shown


@pytest.mark.long
@pytest.mark.timeout(420)
def test_failures_waiting_cancelling_and_down_with_jobs(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiling kernels takes longer than the rest of the test; test_kill_service.py compiles one.
    monkeypatch.setenv("CXX", "none")
    make_tiny_model(installation.home / "models" / "tiny")
    installation.home.chmod(0o700)
    training_file, bad_file = tmp_path / "train.jsonl", tmp_path / "bad.jsonl"
    write_examples(training_file, 200)
    bad_file.write_text('{"text": "fine"}\n{"text": 5}\n')
    useless_file = tmp_path / "useless.jsonl"
    useless_file.write_text('{"prompt": "%s", "completion": "b"}\n' % ("a b " * 5000))
    installation.ok("up", "--detach")

    # Refused at once, with one line of error text.
    assert "nosuch" in installation.refused("submit", "nosuch", str(training_file))
    assert "there is no file" in installation.refused("submit", "tiny", "nosuch.jsonl")
    assert "sequence_length" in installation.refused("submit", "tiny", str(training_file), "--sequence-length", "-1")
    assert "--set takes key=value" in installation.refused("submit", "tiny", str(training_file), "--set", "seed")
    assert "unrecognized" in installation.refused("submit", "tiny", str(training_file), "--set", "speed=9")
    assert "ftjob-1" in installation.refused("show", "ftjob-1")
    assert "no model" in installation.refused("export", "ft:tiny::abc", str(tmp_path / "out"))

    assert "bad.jsonl, line 2, field text: expected a string" in installation.refused("submit", "tiny", str(bad_file))

    # Accepted, then failed: reported before the command ends, or while it follows the job.
    assert "none of its 1 examples has a token to learn" in installation.refused("submit", "tiny", str(useless_file))
    followed = installation.run("submit", "tiny", str(useless_file), *_ENDLESS, "--follow")
    assert followed.returncode == 1
    assert "none of its 1 examples has a token to learn" in followed.stdout

    # One job runs; the other waits and gives the reason.
    running = installation.ok("submit", "tiny", str(training_file), *_ENDLESS)
    _wait_for_status(installation, running, "running")
    waiting = installation.ok("submit", "tiny", str(training_file), *_ENDLESS)
    shown = _wait_for(installation, waiting, lambda job: job["windlass"]["waiting_reason"] is not None, "waiting")
    assert f"is in use by job {running}" in shown
    unprepared = installation.ok("submit", "tiny", str(training_file), *_ENDLESS, "--no-wait")
    assert "is cancelled" in installation.ok("cancel", unprepared)
    _wait_for_status(installation, unprepared, "cancelled")
    assert running in installation.refused("down")
    assert "1 running" in installation.ok("status")
    _wait_for_step(installation, running)
    assert "after its step" in installation.ok("cancel", running)
    _wait_for_status(installation, running, "cancelled")

    # The waiting job now runs and is ended by force: failed, and the next service knows it.
    forced = waiting
    _wait_for_step(installation, forced)
    assert f"job {forced} has failed" in installation.ok("down", "--force")
    assert not list(installation.home.glob("ssd*/*.store"))
    assert not list(Path("/dev/shm").glob(f"windlass-{forced}-*"))
    installation.ok("up", "--detach")
    assert "windlass down --force" in _wait_for_status(installation, forced, "failed")
    assert len([line for line in installation.ok("jobs").splitlines() if line.strip().startswith("ftjob-")]) == 5
    installation.ok("down")
