"""The service as a user starts, watches, kills and ends it."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.installation import Installation
from windlass.planner.hardware.hardware import Hardware
from windlass.planner.hardware.yaml_files import load
from windlass.service.installation.home import find_serving
from windlass.service.installation.process_ids import wait_until_gone


def _wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def _child_pid(installation: Installation, role: str) -> int | None:
    """The pid of the service's API or dispatcher."""
    for process in installation.service_processes():
        try:
            if role in psutil.Process(process.pid).cmdline():
                return process.pid
        except psutil.NoSuchProcess:
            continue
    return None


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=5.0).is_success
    except httpx.TransportError:
        return False


def test_up_twice_restarts_kill_adopt_and_down(installation: Installation) -> None:
    # Up, and up again.
    printed = installation.ok("up", "--detach")
    serving = find_serving(installation.home)
    assert serving is not None
    assert installation.url in printed
    assert str(serving.process.pid) in printed
    assert _answers(installation.url)
    assert installation.home.stat().st_mode & 0o777 == 0o700
    for arguments in (("up",), ("up", "--detach")):
        line = installation.refused(*arguments)
        assert "is up already" in line
        assert installation.url in line
        assert f"process {serving.process.pid}" in line
    assert "jobs  none" in installation.ok("status")

    # A child that dies is started again.
    for role in ("api", "dispatcher"):
        _wait_for(lambda role=role: _child_pid(installation, role) is not None, f"{role} started")  # type: ignore[misc]
        first = _child_pid(installation, role)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        _wait_for(lambda role=role, first=first: _child_pid(installation, role) not in (None, first), f"new {role}")  # type: ignore[misc]
    _wait_for(lambda: _answers(installation.url), "the API answers again")

    # Killed: its children die with it, Ray does not, and the next `up` adopts Ray.
    service, ray = installation.service_processes(), installation.ray_processes()
    os.kill(serving.process.pid, signal.SIGKILL)
    assert wait_until_gone(service, timeout_s=60.0)
    assert installation.run("status").returncode == 1
    installation.ok("up", "--detach")
    assert {process.pid for process in installation.ray_processes()} >= {process.pid for process in ray[:1]}

    # Down: all processes are gone.
    everything = [*installation.service_processes(), *installation.ray_processes()]
    printed = installation.ok("down")
    assert "ended the service" in printed
    assert "ended Ray" in printed
    assert wait_until_gone(everything, timeout_s=60.0)
    assert "nothing to end" in installation.ok("down")


def test_a_port_in_use_is_named_and_nothing_stays(installation: Installation) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", installation.port))
        other.listen()
        for arguments in (("up",), ("up", "--detach")):
            line = installation.refused(*arguments)
            assert line.startswith(f"error: port {installation.port} of 127.0.0.1 is used by another program")
            assert "--port" in line
    assert find_serving(installation.home) is None
    assert installation.ray_processes() == []


def test_commands_without_a_service_say_how_to_start_it(installation: Installation, tmp_path: Path) -> None:
    training_file = tmp_path / "train.jsonl"
    training_file.write_text('{"text": "hello"}\n')
    for arguments in (("submit", "tiny", str(training_file)), ("jobs",), ("cancel", "ftjob-1"), ("logs", "ftjob-1")):
        line = installation.refused(*arguments)
        assert line == f"error: no service answers at {installation.url}; start it with `windlass up --detach`"


def test_a_home_that_others_may_enter_is_refused(installation: Installation) -> None:
    installation.home.mkdir(mode=0o755)
    installation.home.chmod(0o755)
    line = installation.refused("up", "--detach")
    assert f"chmod 700 {installation.home}" in line


def test_a_service_for_others_without_a_key_is_refused_in_one_line(installation: Installation) -> None:
    installation.home.mkdir(mode=0o700)
    (installation.home / "windlass.toml").write_text('host = "0.0.0.0"\n')
    assert "windlass keys create" in installation.refused("up", "--detach")


@pytest.mark.long
def test_doctor_measures_and_saves_what_it_measured(installation: Installation) -> None:
    printed = installation.ok("doctor")
    hardware = load(Hardware, installation.home / "hardware.yaml")
    assert str(installation.home / "hardware.yaml") in printed
    assert "gpus.tflops" in printed
    assert hardware.ssds.count == 2
    assert hardware.gpus.tflops > 0
    assert "no folder" in installation.refused("doctor", "--save", str(installation.home / "missing" / "x.yaml"))


@pytest.mark.long
def test_up_measures_a_machine_once(installation: Installation) -> None:
    printed = installation.ok("up", "--detach", "--measure", timeout_s=600)
    assert "was not measured yet" in printed
    assert load(Hardware, installation.home / "hardware.yaml").ssds.count == 2
    installation.ok("down")
    assert "measur" not in installation.ok("up", "--detach", "--measure")


def test_doctor_tells_what_the_machine_has(installation: Installation) -> None:
    printed = installation.ok("doctor", "--quick")
    assert f"cores {len(os.sched_getaffinity(0))}" in " ".join(printed.split())
    assert "/dev/shm" in printed
    assert "GPU" in printed
