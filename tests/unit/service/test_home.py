"""A home is private, and has one supervisor."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.power_cut import PowerCut
from windlass.service.client import ServiceUnreachableError
from windlass.service.home import (
    AlreadyUpError,
    HomeError,
    HomeLock,
    find_serving,
    last_url,
    node_of,
    prepare_home,
)
from windlass.service.local_key import open_client
from windlass.service.settings import Settings


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


def test_the_second_supervisor_learns_who_the_first_is(tmp_path: Path) -> None:
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
    code = "import os, sys; from pathlib import Path; from windlass.service.home import HomeLock\n"
    code += "HomeLock(Path(sys.argv[1])).acquire('http://127.0.0.1:1'); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert find_serving(tmp_path) is None
    lock = HomeLock(tmp_path)
    lock.acquire("http://127.0.0.1:2")
    lock.release()


def test_nobody_serves_an_empty_home(tmp_path: Path) -> None:
    assert find_serving(tmp_path) is None


def test_node_of_power_loss_afterwards_leaves_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = PowerCut(tmp_path, monkeypatch)
    node = node_of(tmp_path)
    assert cut.left()["node"] == f"{node}\n".encode()


def test_the_address_of_a_service_that_was_killed_stays_known_and_of_one_that_ended_it_does_not(tmp_path: Path) -> None:
    lock = HomeLock(tmp_path)
    lock.acquire("http://127.0.0.1:9000")
    recorded = (tmp_path / "windlass.lock").read_text()
    lock.release()
    assert (find_serving(tmp_path), last_url(tmp_path)) == (None, None)
    fields = json.loads(recorded)
    fields["process"]["start"] = "of another boot"
    (tmp_path / "windlass.lock").write_text(json.dumps(fields))
    assert find_serving(tmp_path) is None
    assert last_url(tmp_path) == "http://127.0.0.1:9000"
    with open_client(Settings(home=tmp_path)) as client, pytest.raises(ServiceUnreachableError, match=":9000"):
        client.jobs()
