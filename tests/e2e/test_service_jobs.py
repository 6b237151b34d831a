"""What people see of jobs that fail, wait, are cancelled, or are in the way of `windlass down`."""

import time
from pathlib import Path

import pytest

from tests.e2e.installation import Installation, make_tiny_model, write_examples

_SMALL = ("--epochs", "1", "--batch-size", "1", "--sequence-length", "32", "--precision", "fp32")


def _wait_for(installation: Installation, job_id: str, text: str, timeout_s: float = 90.0) -> str:
    """Until `windlass show` says so; what it showed."""
    deadline = time.monotonic() + timeout_s
    while text not in (shown := " ".join(installation.ok("show", job_id).split())):
        assert time.monotonic() < deadline, f"never {text!r}: {shown}{installation.logs()}"
        time.sleep(0.2)
    return shown


@pytest.mark.timeout(420)
def test_failures_waiting_cancelling_and_down_with_jobs(installation: Installation, tmp_path: Path) -> None:
    make_tiny_model(installation.home / "models" / "tiny")
    installation.home.chmod(0o700)
    long_file, bad_file = tmp_path / "long.jsonl", tmp_path / "bad.jsonl"
    write_examples(long_file, 2000)
    bad_file.write_text('{"text": "fine"}\n{"text": 5}\n')
    installation.ok("up", "--detach")

    # Refused at once, in one line.
    assert "nosuch" in installation.refused("submit", "nosuch", str(long_file))
    assert "there is no file" in installation.refused("submit", "tiny", "nosuch.jsonl")
    assert "sequence_length" in installation.refused("submit", "tiny", str(long_file), "--sequence-length", "-1")
    assert "--set takes key=value" in installation.refused("submit", "tiny", str(long_file), "--set", "seed")
    assert "unrecognized" in installation.refused("submit", "tiny", str(long_file), "--set", "speed=9")
    assert "ftjob-1" in installation.refused("show", "ftjob-1")
    assert "no model" in installation.refused("export", "ft:tiny::abc", str(tmp_path / "out"))

    # Accepted, then failed, with line and field.
    followed = installation.run("submit", "tiny", str(bad_file), *_SMALL, "--follow")
    assert followed.returncode == 1
    assert "line 2" in followed.stdout
    assert "text" in followed.stdout
    starved = installation.run(
        "submit", "tiny", str(long_file), *_SMALL, "--set", "budgets.host_memory_gib=0.000001", "-f"
    )
    assert starved.returncode == 1
    assert "budget" in starved.stdout

    # One runs, one waits and says for what.
    running = installation.ok("submit", "tiny", str(long_file), *_SMALL)
    _wait_for(installation, running, "status running")
    waiting = installation.ok("submit", "tiny", str(long_file), *_SMALL)
    assert running in _wait_for(installation, waiting, "is in use by job")
    installation.ok("cancel", waiting)
    _wait_for(installation, waiting, "status cancelled")
    assert running in installation.refused("down")
    assert "1 running" in installation.ok("status")
    _wait_for(installation, running, "last metrics Step")
    assert "after its step" in installation.ok("cancel", running)
    _wait_for(installation, running, "status cancelled")

    # Ended by force while it runs: failed, and the next service knows.
    forced = installation.ok("submit", "tiny", str(long_file), *_SMALL)
    _wait_for(installation, forced, "last metrics Step")
    assert f"job {forced} has failed" in installation.ok("down", "--force")
    assert not list(installation.home.glob("ssd*/*.store"))
    assert not list(Path("/dev/shm").glob(f"windlass-{forced}-*"))
    installation.ok("up", "--detach")
    assert "windlass down --force" in _wait_for(installation, forced, "status failed")
    assert len([line for line in installation.ok("jobs").splitlines() if line.strip().startswith("ftjob-")]) == 5
    installation.ok("down")
