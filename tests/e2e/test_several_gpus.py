"""Jobs on several devices, as the user sees them. The CPU counts as two, by a setting."""

from pathlib import Path

import pytest

from tests.e2e.installation import Installation, make_tiny_model, write_examples
from windlass.planner.hardware.hardware import Gpus, Hardware, Host, Pcie, Ssds, save_hardware
from windlass.service.installation.settings import HARDWARE_FILE

CPU = Hardware(
    gpus=Gpus(count=0, memory_gib=4.0, tflops=0.05),
    host=Host(memory_gib=4.0, memory_gb_per_s=10.0, adam_params_per_s=1e8),
    pcie=Pcie(h2d_gb_per_s=5.0, d2h_gb_per_s=5.0),
    ssds=Ssds(
        count=2, read_gb_per_s=1.0, write_gb_per_s=1.0, capacity_gib=10.0, combined_gb_per_s=2.0, cpu_s_per_gb=0.1
    ),
)
_JOB = ("--batch-size", "4", "--sequence-length", "32", "--precision", "fp32", "--set", "seed=7")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_planned_job_on_two_devices_trains_pauses_and_makes_others_wait(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "none")  # compiling kernels takes longer than the rest of the test
    monkeypatch.setenv("WINDLASS_CPU_RANKS", "2")
    make_tiny_model(installation.home / "models" / "tiny")
    installation.home.chmod(0o700)
    save_hardware(CPU, installation.home / HARDWARE_FILE)
    training_file = tmp_path / "train.jsonl"
    write_examples(training_file, 64)
    installation.ok("up", "--detach")
    submit = ("submit", "tiny", str(training_file), *_JOB)
    told = "windlass.gpus is 3, and the machine has no GPU: its CPU counts as 2 devices (setting cpu_ranks)"
    assert told in installation.refused(*submit, "--gpus", "3")

    asked = ("--gpus", "2", "--set", "lanes=2", "--epochs", "1000")
    both = installation.ok(*submit, *asked)  # it trains until the test ends it
    one = installation.ok(*submit, "--epochs", "2")
    installation.await_job(both, lambda job: job["windlass"]["step"] >= 2, "two steps")
    waiting = installation.await_job(one, lambda job: job["status"] == "queued", "queued")
    assert waiting["windlass"]["waiting_reason"] == f"the CPU is in use by job {both}"
    shown = " ".join(installation.ok("show", both).split())
    assert " GPUs 2 " in shown
    assert '"lanes": 2' in shown
    installation.ok("pause", both)
    paused = installation.await_job(both, lambda job: job["status"] == "paused", "paused")
    installation.await_job(one, lambda job: job["status"] == "succeeded", "done")
    installation.ok("resume", both)
    step = paused["windlass"]["step"] + 3
    running = installation.await_job(both, lambda job: job["windlass"]["step"] >= step, "three steps more")
    assert running["windlass"]["attempt"] == 2
    assert running["windlass"]["has_plan"]
    assert "predicted" in " ".join(installation.ok("show", both).split())
    installation.ok("pause", both)
    paused = installation.await_job(both, lambda job: job["status"] == "paused", "paused")
    assert "windlass.gpus is 3, and the machine has no GPU" in installation.refused("resume", both, "--gpus", "3")
    installation.ok("resume", both, "--gpus", "1")
    step = paused["windlass"]["step"] + 3
    running = installation.await_job(both, lambda job: job["windlass"]["step"] >= step, "three steps more")
    assert (running["windlass"]["attempt"], running["windlass"]["settings"]["gpus"]) == (3, 1)
    assert '"lanes": 2' in " ".join(installation.ok("show", both).split())
    installation.ok("cancel", both)
    installation.await_job(both, lambda job: job["status"] == "cancelled", "cancelled")
