"""The runner's own part of an attempt, without Ray."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from tests.unit.actors.specs import make_spec
from windlass.actors.attempt_lock import close_attempt, has_begun
from windlass.actors.deploy import Runner
from windlass.actors.journal import read_journal
from windlass.actors.scheduler import INTERRUPTED, ActorLostError
from windlass.storage.ids import Attempt


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))
    return Runner(make_spec(job_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ActorLostError("the process of ssd-0 died"), INTERRUPTED),
        (ray.exceptions.ActorDiedError(), INTERRUPTED),
        (ValueError("the model has no weights"), "failed"),
        (RuntimeError("a bug"), "failed"),
    ],
)
def test_a_process_that_dies_while_the_attempt_starts_is_no_failure_of_the_job(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: str
) -> None:
    def attempt() -> None:
        raise error

    monkeypatch.setattr(runner, "_attempt", attempt)
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert (outcome.kind, outcome.data["status"]) == ("outcome", status)


def test_the_attempt_has_begun_when_start_returns(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_attempt", lambda: None)
    runner.start()
    assert has_begun(tmp_path, Attempt(2))
    assert not close_attempt(tmp_path, Attempt(2))
    os.close(runner._attempt_lock)
    assert close_attempt(tmp_path, Attempt(2))
