"""A home is private, and has one supervisor."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.power_cut import PowerCut
from windlass.service.home import AlreadyUpError, HomeError, HomeLock, find_serving, node_of, prepare_home


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
