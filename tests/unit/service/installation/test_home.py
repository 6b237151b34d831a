"""A home is private, and has one supervisor."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.support.power_cut import PowerCut
from windlass.service.cli.jobs import jobs
from windlass.service.cli.service import status
from windlass.service.installation.client import ServiceUnreachableError
from windlass.service.installation.home import (
    AlreadyUpError,
    HomeError,
    HomeLock,
    find_killed,
    find_serving,
    node_of,
    prepare_home,
)
from windlass.service.installation.settings import load_settings
from windlass.service.processes.shutdown import shut_down


def test_a_new_home_is_private(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "home"
    prepare_home(home)
    prepare_home(home)
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_home_that_others_can_read_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o750)
    with pytest.raises(HomeError, match=f"mode 750.*chmod 700 {home}"):
        prepare_home(home)


def test_home_that_cannot_be_made_is_named() -> None:
    with pytest.raises(HomeError, match=r"the home /proc/windlass-test cannot be made \(.+\); choose another"):
        prepare_home(Path("/proc/windlass-test"))


def test_second_supervisor_gets_identity_of_first(tmp_path: Path) -> None:
    first, second = HomeLock(tmp_path), HomeLock(tmp_path)
    first.acquire("http://127.0.0.1:1234")
    serving = find_serving(tmp_path)
    assert serving is not None
    assert serving.url == "http://127.0.0.1:1234"
    with pytest.raises(AlreadyUpError, match=rf"at http://127.0.0.1:1234 by process {serving.process.pid}"):
        second.acquire("http://127.0.0.1:5678")
    first.release()
    second.acquire("http://127.0.0.1:5678")
    second.release()


def test_a_supervisor_that_died_holds_nothing(tmp_path: Path) -> None:
    _kill_supervisor(tmp_path)
    assert find_serving(tmp_path) is None
    lock = HomeLock(tmp_path)
    lock.acquire("http://127.0.0.1:2")
    lock.release()


def test_find_serving_in_empty_home_finds_none(tmp_path: Path) -> None:
    assert find_serving(tmp_path) is None


def test_node_of_power_loss_afterwards_leaves_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = PowerCut(tmp_path, monkeypatch)
    node = node_of(tmp_path)
    assert cut.left()["node"] == f"{node}\n".encode()


KILLED_URL = "http://127.0.0.1:1"  # a port on which no process answers


def _kill_supervisor(home: Path) -> None:
    """Leaves the record of a supervisor that was killed."""
    code = "import os, sys; from pathlib import Path; from windlass.service.installation.home import HomeLock\n"
    code += f"HomeLock(Path(sys.argv[1])).acquire({KILLED_URL!r}); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(home)], check=False)


def test_find_killed_supervisor_is_known_until_another_one_ends_in_order(tmp_path: Path) -> None:
    assert find_killed(tmp_path) is None
    _kill_supervisor(tmp_path)
    killed = find_killed(tmp_path)
    assert killed is not None
    assert killed.url == KILLED_URL
    lock = HomeLock(tmp_path)
    lock.acquire("http://127.0.0.1:2")
    assert find_killed(tmp_path) is None
    lock.release()
    assert (find_killed(tmp_path), find_serving(tmp_path)) == (None, None)


def test_find_killed_supervisor_is_forgotten_after_down(tmp_path: Path) -> None:
    _kill_supervisor(tmp_path)
    settings = load_settings(tmp_path)
    assert shut_down(settings, force=False).supervisor is None
    assert find_killed(tmp_path) is None


def test_commands_after_a_crash_tell_the_recorded_address_and_how_to_start_the_service_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the default port, where the service of another home may answer."""
    _kill_supervisor(tmp_path)
    killed = find_killed(tmp_path)
    assert killed is not None
    told = (
        f"where the service of {tmp_path} was (process {killed.process.pid}) until it was killed or crashed; "
        "start it with `windlass up --detach"
    )
    with pytest.raises(ServiceUnreachableError) as caught:
        jobs(home=tmp_path)
    assert str(caught.value) == f"no service answers at {KILLED_URL}, {told} --port 1`"
    with pytest.raises(typer.Exit):
        status(home=tmp_path)
    line = f"windlass is not running: nothing answers at {KILLED_URL}, {told}"
    assert capsys.readouterr().out == f"{line} --port 1`\n"
    monkeypatch.setenv("WINDLASS_PORT", "1")
    with pytest.raises(typer.Exit):
        status(home=tmp_path)
    assert capsys.readouterr().out == f"{line}`\n"
