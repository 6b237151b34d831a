"""An installation of the previous release is upgraded: its paused job and its training job continue."""

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.installation import Installation, free_port

# Made by `tests/support/old_installation/make.py`, with the previous release.
ARCHIVE = Path(__file__).parents[1] / "support" / "old_installation" / "installation.tar.xz"


@pytest.fixture
def upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    """The older home, at another place, with this release's programs."""
    monkeypatch.setenv("CXX", "none")  # compiling kernels takes longer than the rest of the test
    with tarfile.open(ARCHIVE) as file:
        file.extractall(tmp_path, filter="data")
    (tmp_path / "home").chmod(0o700)
    installation = Installation(home=tmp_path / "home", port=free_port())
    yield installation
    installation.end()
    shutil.rmtree(tmp_path / "home")


def _jobs(upgraded: Installation) -> tuple[dict[str, Any], dict[str, Any]]:
    """The paused job, and the one that was training."""
    jobs = httpx.get(f"{upgraded.url}/v1/fine_tuning/jobs", trust_env=False).json()["data"]
    (paused,) = (job for job in jobs if job["status"] == "paused")
    (running,) = (job for job in jobs if job["status"] in ("queued", "running"))
    return paused, running


@pytest.mark.timeout(400)
def test_upgraded_installation_goes_on_with_its_training_job(upgraded: Installation) -> None:
    upgraded.ok("up", "--detach")
    _, running = _jobs(upgraded)
    killed_at = running["windlass"]["step"]
    upgraded.await_job(running["id"], lambda job: job["windlass"]["step"] > killed_at + 3, "gone on", timeout_s=300)
    assert "Resuming after step" in upgraded.ok("logs", running["id"])


@pytest.mark.long
@pytest.mark.timeout(400)
def test_upgraded_installation_ends_its_paused_job_with_a_model(upgraded: Installation, tmp_path: Path) -> None:
    upgraded.ok("up", "--detach")
    paused, running = _jobs(upgraded)
    upgraded.ok("cancel", running["id"])
    upgraded.ok("resume", paused["id"])
    done = upgraded.await_job(paused["id"], lambda job: job["status"] == "succeeded", "succeeded", timeout_s=300)

    upgraded.ok("export", done["fine_tuned_model"], str(tmp_path / "model"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 0
