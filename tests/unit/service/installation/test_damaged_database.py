"""A damaged SQLite file: reported at the start, and in the answers of a running service."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, upload
from tests.support.service.keyed import new_job
from windlass.service import __main__ as process
from windlass.service.auth.exposure import prepare_database
from windlass.service.cli import keys as cli_keys
from windlass.service.cli import service as cli_service
from windlass.service.cli.orphaned_states import free_unknown_states
from windlass.service.installation.home import Serving
from windlass.service.installation.process_ids import ProcessId
from windlass.service.installation.settings import Settings
from windlass.service.processes import machine_profile as measured_machine
from windlass.service.processes import shutdown as lifecycle
from windlass.service.validation.database_errors import DatabaseUnavailableError
from windlass.storage.sql.database import Database, check_whole, migrate
from windlass.storage.sql.errors import DamagedDatabase
from windlass.storage.sql.repositories.jobs import JobRepository


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    """Overwrites all but its header."""
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))


def write_text(path: Path) -> None:
    path.write_text("not a database, but long enough to be one" * 1000)


def empty(path: Path) -> None:
    os.truncate(path, 0)


DAMAGES = (cut_off, overwrite, write_text, empty)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """The settings of a home with a job."""
    settings = Settings(home=tmp_path / "home")
    settings.home.mkdir(mode=0o700)
    settings.make_dirs()
    migrate(settings.database_url)
    database = Database(settings.database_url)
    with database.write() as session:
        for _ in range(50):
            job = JobRepository(session).create(new_job("file-x", None))
    database.close()
    (settings.jobs_dir / job.id).mkdir()
    return settings


def database_of(settings: Settings) -> Path:
    return settings.home / "windlass.db"


@pytest.mark.parametrize("damage", DAMAGES)
def test_prepare_database_damaged_file_names_it_and_what_to_do(
    settings: Settings, damage: Callable[[Path], None]
) -> None:
    prepare_database(settings)
    damage(database_of(settings))
    before = database_of(settings).read_bytes()
    with pytest.raises(DatabaseUnavailableError) as raised:
        prepare_database(settings)
    text = str(raised.value)
    assert text.startswith(f"the database {database_of(settings)} is damaged (")
    assert text.endswith("bring a backup back with `windlass restore`")
    assert "\n" not in text
    assert database_of(settings).read_bytes() == before, "whoever repairs it needs what is left"


def test_check_whole_empty_file_of_a_new_home_is_no_damage(tmp_path: Path) -> None:
    """A start that was killed leaves such a file."""
    for name in ("a.db", "b.db"):
        (tmp_path / name).touch()
    check_whole(f"sqlite:///{tmp_path}/a.db", has_rows=False)
    with pytest.raises(DamagedDatabase, match="it is empty, and there are jobs"):
        check_whole(f"sqlite:///{tmp_path}/b.db", has_rows=True)
    check_whole(f"sqlite:///{tmp_path}/none.db", has_rows=True)
    assert not (tmp_path / "none.db").exists()


def test_a_file_that_is_damaged_while_the_service_runs_is_told(client: TestClient) -> None:
    """A list of jobs and `/readyz` read the same table."""
    upload(client)
    context = context_of(client)
    with context.database.write() as session:
        for _ in range(200):
            JobRepository(session).create(new_job("file-x", None))
    context.database.close()  # the write-ahead log is written into the file
    overwrite(context.settings.home / "windlass.db")
    response = client.get("/v1/fine_tuning/jobs")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "database_unavailable"
    assert "its file is damaged; `windlass restore`" in response.json()["error"]["message"]
    ready = client.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["reasons"] == [
        "the database cannot be used: its file is damaged; `windlass restore` brings a backup back"
    ]


def test_shut_down_with_a_damaged_database_ends_the_service_where_it_is_forced(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    overwrite(database_of(settings))
    serving, ended = ProcessId(pid=os.getpid(), start="boot 1"), []
    monkeypatch.setattr(lifecycle, "find_serving", lambda _home: Serving(process=serving, url="http://127.0.0.1:1"))
    monkeypatch.setattr(lifecycle, "end_processes", lambda processes, grace_s: ended.extend(processes))
    with pytest.raises(DatabaseUnavailableError, match="its file is damaged"):
        lifecycle.shut_down(settings, force=False)
    assert ended == []
    with pytest.raises(DatabaseUnavailableError, match="its file is damaged"):
        lifecycle.shut_down(settings, force=True)
    assert ended == [serving]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "command",
    [
        lambda settings: cli_keys.list_(settings.home),
        lambda settings: cli_keys.create(name="ann", home=settings.home),
        lambda settings: cli_keys.revoke("key-1", settings.home),
        lambda settings: cli_keys.audit(home=settings.home),
        lambda settings: free_unknown_states(settings, "ftjob-1"),
        lambda settings: cli_service.up(detach=True, measure=True, home=settings.home),
    ],
    ids=["keys list", "keys create", "keys revoke", "keys audit", "delete --states", "up"],
)
def test_commands_on_a_damaged_file_name_it_and_what_to_do(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    command: Callable[[Settings], None],
) -> None:
    monkeypatch.setattr(measured_machine, "ensure_measured", lambda *_: pytest.fail("that takes half a minute"))
    damage(database_of(settings))
    with pytest.raises(DatabaseUnavailableError) as raised:
        command(settings)
    assert str(raised.value).startswith(f"the database {database_of(settings)} is damaged (")
    assert str(raised.value).endswith("bring a backup back with `windlass restore`")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("role", ["api", "dispatcher"])
def test_processes_without_a_supervisor_say_it_in_one_line(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    role: str,
) -> None:
    """As in containers."""
    monkeypatch.setenv("WINDLASS_HOME", str(settings.home))
    for name in ("_serve_api", "_dispatch"):
        monkeypatch.setattr(process, name, lambda *_: pytest.fail("it goes on"))
    damage(database_of(settings))
    before = os.umask(0o022)
    try:
        assert process.main([role]) == 1
    finally:
        os.umask(before)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: the database {database_of(settings)} is damaged (")
