"""A service whose disk is full: its running job reports that it waits for space, and continues once there is space."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.e2e.installation import Installation, free_port, make_tiny_model, write_examples
from tests.e2e.live_service import LiveService
from tests.e2e.pages import OpenPage


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system in memory."""
    path = tmp_path / "disk"
    path.mkdir()
    options = ["-t", "tmpfs", "-o", "size=512m,mode=0700"]
    done = subprocess.run(["mount", *options, "none", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def on_small_disk(small_disk: Path) -> Iterator[Installation]:
    installation = Installation(home=small_disk / "home", port=free_port())
    yield installation
    installation.end()


def _fill(path: Path) -> Path:
    """Writes a file until no byte is free."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        for nbytes in (1 << 20, 1 << 12, 1):
            while True:
                try:
                    if file.write(bytes(nbytes)) < nbytes:
                        break
                except OSError:
                    break
    return filler


@pytest.fixture
def service_home(small_disk: Path) -> Path:
    return small_disk


@pytest.mark.long
def test_the_page_tells_that_a_running_job_waits_for_room_without_an_event(
    service: LiveService, open_page: OpenPage, small_disk: Path
) -> None:
    job_id = service.run()
    service.train(job_id, 1, 2.0)
    page = open_page(f"#/jobs/{job_id}")
    expect(page.locator("#detail-steps")).to_have_text("step 1 of 10")
    expect(page.locator("#detail-reason")).to_be_hidden()
    filler = _fill(small_disk)
    waits = f"Waiting: room on the disk of {small_disk}: 64.00 MiB needed, 0 bytes free"
    expect(page.locator("#detail-reason")).to_have_text(waits)
    expect(page.locator("#detail-status")).to_have_text("running")
    filler.unlink()
    expect(page.locator("#detail-reason")).to_be_hidden()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_running_job_on_a_full_disk_says_so_and_goes_on_with_room(
    on_small_disk: Installation, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "none")  # compiling kernels takes longer than the rest of the test
    monkeypatch.setenv("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    installation = on_small_disk
    make_tiny_model(installation.home / "models" / "tiny")
    installation.home.chmod(0o700)
    training_file = tmp_path / "train.jsonl"
    write_examples(training_file, 200)
    installation.ok("up", "--detach")
    options = ("--epochs", "1000", "--batch-size", "1", "--sequence-length", "32", "--precision", "fp32")
    job_id = installation.ok("submit", "tiny", str(training_file), *options)
    installation.await_job(job_id, lambda job: job["windlass"]["step"] > 5, "a step", timeout_s=240)

    filler = _fill(small_disk)
    job = installation.await_job(job_id, lambda job: job["windlass"]["waiting_reason"], "waiting", timeout_s=120)
    reason = f"room on the disk of {installation.home}: 64.00 MiB needed, 0 bytes free"
    assert job["windlass"]["waiting_reason"] == reason
    shown = " ".join(installation.ok("show", job_id).split())
    assert f"status {job['status']} waiting for {reason}" in shown
    assert reason in installation.ok("jobs")

    filler.unlink()
    job = installation.await_job(
        job_id,
        lambda job: job["windlass"]["attempt"] > 1 and not job["windlass"]["waiting_reason"],
        "going on",
        timeout_s=240,
    )
    step = job["windlass"]["step"]
    installation.await_job(job_id, lambda job: job["windlass"]["step"] > step, "a step more", timeout_s=240)
    told = installation.ok("logs", job_id)
    assert "Attempt 1 was lost: " in told
    assert f"The disk of {installation.home} was full for " in told
    assert "Attempt 2 started" in told
    installation.ok("cancel", job_id)
