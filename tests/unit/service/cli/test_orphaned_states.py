"""States that no database knows are freed by a command, and states of known jobs are not."""

import getpass
import os
from pathlib import Path

import pytest

from tests.support.service.dispatcher_stage import Stage
from windlass.service.cli import orphaned_states as unknown_states
from windlass.service.cli.data import delete
from windlass.service.cli.errors import CommandError
from windlass.storage.ids import JobId

UNKNOWN, OTHER = "ftjob-unknown", "ftjob-other"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"  # the stage's


@pytest.fixture
def stage(stage: Stage, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage whose database the command finds."""
    monkeypatch.setenv("WINDLASS_DATABASE_URL", database_url)
    stage.put_states(UNKNOWN)
    stage.put_states(OTHER)
    return stage


def test_orphaned_states_are_freed_on_every_ssd_and_others_stay(
    stage: Stage, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    delete([UNKNOWN], states=True, home=home)
    assert stage.jobs_on_ssds() == [{OTHER}, {OTHER}]
    assert capsys.readouterr().out.startswith(f"{UNKNOWN}: ")
    with pytest.raises(CommandError, match=f"holds states of job {UNKNOWN}"):
        delete([UNKNOWN], states=True, home=home)
    assert stage.audit() == [("free_unknown_states", UNKNOWN, getpass.getuser(), "command line")]


def test_states_of_known_or_running_job_stay(stage: Stage, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = stage.submit()
    stage.put_states(job_id)
    with pytest.raises(CommandError, match=f"job {job_id} is known here"):
        delete([job_id], states=True, home=home)
    monkeypatch.setattr(unknown_states, "arenas_in", lambda _: {JobId(UNKNOWN): 4096})
    with pytest.raises(CommandError, match=f"job {UNKNOWN} runs on this machine"):
        delete([UNKNOWN], states=True, home=home)
    with pytest.raises(CommandError, match="'file-1' is not the id of a job"):
        delete(["file-1"], states=True, home=home)
    assert stage.jobs_on_ssds() == [{UNKNOWN, OTHER, job_id}] * 2
    assert stage.audit() == []


def test_freeing_orphaned_states_is_audited_without_a_user_name(
    stage: Stage, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nobody)
    delete([UNKNOWN], states=True, home=home)
    assert stage.audit() == [("free_unknown_states", UNKNOWN, f"uid {os.getuid()}", "command line")]
