"""A job outlives the service that started it, and its record has no gap."""

import os
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.installation import Installation, make_tiny_model, write_examples
from tests.pretend_gpus import pretend_gpus, visible_gpus
from windlass.actors.job.journal import read_journal
from windlass.service.installation.process_ids import wait_until_gone

_NUM_STEPS = 40  # enough that the job still trains when a busy machine has found and killed the service
# Seconds: only a hang takes that long. Compiling a kernel takes minutes on a busy machine.
_DEADLINE_S, _COMPILE_DEADLINE_S = 150.0, 900.0


def _steps_in_journal(installation: Installation, job_id: str) -> int:
    records = read_journal(installation.home / "jobs" / job_id / "journal.jsonl")
    return max((record.data["step"] for record in records if record.kind == "metrics"), default=0)


def _wait_for_step(installation: Installation, job_id: str, step: int, timeout_s: float = _DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while _steps_in_journal(installation, job_id) < step:
        journal = [record.message for record in read_journal(installation.home / "jobs" / job_id / "journal.jsonl")]
        assert time.monotonic() < deadline, f"step {step} was not reached: {journal[-5:]}{installation.logs()}"
        time.sleep(0.1)


def _events(installation: Installation, job_id: str) -> list[dict[str, object]]:
    """All events from the API, newest first."""
    events: list[dict[str, object]] = []
    while True:
        query = {"limit": "50"} | ({"after": str(events[-1]["id"])} if events else {})
        page = httpx.get(f"{installation.url}/v1/fine_tuning/jobs/{job_id}/events", params=query).json()
        events += page["data"]
        if not page["has_more"]:
            return events


@pytest.mark.parametrize(
    "compiles",
    [
        pytest.param(False, marks=pytest.mark.timeout(420)),
        pytest.param(True, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_a_job_goes_on_while_the_service_is_dead_and_nothing_is_missing(
    installation: Installation,
    tmp_path: Path,
    compiled_kernels: Path | None,
    compiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`compiles`: uses a home without a compiled kernel; compiling takes longer than the rest of the test.

    The other job trains where Ray has a GPU, which is simulated.
    """
    if not compiles:
        for name, value in pretend_gpus(1).items():
            monkeypatch.setenv(name, value)
    kernels = installation.home / "kernels"
    if compiled_kernels is not None and not compiles:
        shutil.copytree(compiled_kernels, kernels, ignore=shutil.ignore_patterns("compiling-*"))
    make_tiny_model(installation.home / "models" / "tiny")
    installation.home.chmod(0o700)
    training_file, validation_file = tmp_path / "train.jsonl", tmp_path / "valid.jsonl"
    write_examples(training_file, _NUM_STEPS)
    write_examples(validation_file, 4)
    installation.ok("up", "--detach")
    options = ("--epochs", "1", "--batch-size", "1", "--sequence-length", "32", "--precision", "bf16")
    job_id = installation.ok(
        *("submit", "tiny", str(training_file), "--validation-file", str(validation_file), *options),
        *("--learning-rate", "0.001", "--set", "seed=7"),
    )
    _wait_for_step(installation, job_id, 3, _COMPILE_DEADLINE_S if compiles else _DEADLINE_S)
    seen = visible_gpus(installation.home / "jobs" / job_id)
    gpus = {} if compiles else {"gpu-0": "0", "optimizer-0": "", "ssd-0": "", "ssd-1": ""}
    assert seen == gpus

    service = installation.service_processes()
    assert len(service) >= 3
    for process in service:
        os.kill(process.pid, signal.SIGKILL)
    assert wait_until_gone(service, timeout_s=60.0)
    before = _steps_in_journal(installation, job_id)
    assert before < _NUM_STEPS, "the job was over before the service was killed: it must train longer"
    _wait_for_step(installation, job_id, before + 5)

    installation.ok("up", "--detach")
    followed = installation.ok("logs", "-f", job_id, timeout_s=240)
    model_id = followed.splitlines()[-1]
    events = _events(installation, job_id)
    data = [event["data"] for event in events if event["type"] == "metrics"]
    trained = Counter(metrics["step"] for metrics in data if isinstance(metrics, dict) and "train_loss" in metrics)
    assert trained == Counter(range(1, _NUM_STEPS + 1))
    messages = [re.sub(r"\s+", " ", str(event["message"])) for event in events]
    assert sum(message.startswith("Fine-tuning job started") for message in messages) == 1
    assert f"New fine-tuned model created: {model_id}" in messages[0]

    shown = " ".join(installation.ok("show", job_id).split())
    assert "status succeeded" in shown
    assert f"step {_NUM_STEPS} of {_NUM_STEPS}" in shown
    installation.ok("export", job_id, str(tmp_path / "exported"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    assert model_id in installation.ok("models")
    files = installation.ok("files")
    assert all(name in files for name in ("step_metrics.csv", "train.jsonl", "valid.jsonl")), files
    if compiled_kernels is not None:
        names = {path.name for path in compiled_kernels.glob("*.so")}
        made = {path.name for path in kernels.glob("*.so")}
        assert made <= names
        assert len(made) == (1 if compiles else len(names))
    installation.ok("down")
