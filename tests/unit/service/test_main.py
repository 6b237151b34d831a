"""The service's processes without a supervisor, as in containers."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import trustme

from windlass.service import __main__ as service_main
from windlass.service.cli import main as cli_main
from windlass.service.installation.settings import Settings, SettingsError
from windlass.storage.sql.database import Database
from windlass.storage.sql.repositories.jobs import JobRepository

_DEADLINE_S = 120.0


@contextmanager
def _api(home: Path, port: int) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", "windlass.service", "api"]
    environment = {**os.environ, "WINDLASS_HOME": str(home), "WINDLASS_PORT": str(port)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _answer(url: str, process: "subprocess.Popen[str]") -> httpx.Response:
    until_s = time.monotonic() + _DEADLINE_S
    while True:
        try:
            return httpx.get(url, timeout=_DEADLINE_S)
        except httpx.TransportError:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until_s
            time.sleep(0.1)


def test_the_api_opens_its_port_itself_and_makes_no_ssd_directories(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with _api(home, port) as process:
        ready = _answer(f"http://127.0.0.1:{port}/readyz", process)
        assert (ready.status_code, ready.json()["status"]) == (200, "ok")
        assert home.stat().st_mode & 0o777 == 0o700
        assert (home / "files").is_dir()
        assert not (home / "ssd0").exists()
        process.terminate()
        process.communicate(timeout=_DEADLINE_S)


@pytest.mark.long
def test_the_api_says_that_its_port_is_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with _api(tmp_path / "home", port) as process:
            _, told = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 1
    assert f"error: port {port} of 127.0.0.1 is used by another program" in told


@pytest.mark.parametrize("role", ["api", "dispatcher"])
def test_a_home_that_others_may_enter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    monkeypatch.setenv("WINDLASS_HOME", str(home))
    assert service_main.main([role]) == 1
    assert "others may enter the home" in capsys.readouterr().err


def test_dispatcher_finds_folders_and_database_in_any_start_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("WINDLASS_HOME", str(home))
    found = []

    def dispatch(settings: Settings) -> None:
        database = Database(settings.database_url)
        with database.read() as session:
            found.append(JobRepository(session).count_by_status())
        database.close()
        assert all(path.is_dir() for path in (settings.jobs_dir, *settings.ssd_dirs))

    monkeypatch.setattr(service_main, "_dispatch", dispatch)
    assert service_main.main(["dispatcher"]) == 0
    assert found == [{}]


def test_tls_context_with_the_key_of_another_certificate_tells_both_files(tmp_path: Path) -> None:
    paths = {"tls_certificate": tmp_path / "certificate.pem", "tls_key": tmp_path / "key.pem"}
    authority = trustme.CA()
    authority.issue_cert("box.example").cert_chain_pems[0].write_to_path(str(paths["tls_certificate"]))
    authority.issue_cert("box.example").private_key_pem.write_to_path(str(paths["tls_key"]))
    with pytest.raises(SettingsError, match=r"certificate\.pem and tls_key .*key\.pem cannot be used: .*its own key"):
        service_main._tls_context(Settings.model_construct(**paths))


@pytest.fixture
def umask() -> Iterator[None]:
    """The usual umask, which lets other users read new files."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_files_of_command_line_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds for every command: exported models, measured machines, saved plans."""
    monkeypatch.setattr(sys, "argv", ["windlass", "plan", "--help"])
    with pytest.raises(SystemExit):
        cli_main()
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").touch()
    assert [path.stat().st_mode & 0o077 for path in (tmp_path / "made", tmp_path / "made" / "file")] == [0, 0]


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("role", ["supervisor", "api", "dispatcher"])
def test_files_of_service_processes_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    for name in ("_supervise", "_serve_api", "_dispatch"):
        monkeypatch.setattr(service_main, name, lambda *_: (tmp_path / "file").touch())
    assert service_main.main([role]) == 0
    assert (tmp_path / "file").stat().st_mode & 0o077 == 0
