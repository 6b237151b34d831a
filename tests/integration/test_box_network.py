"""Boxes of namespaces on one machine, which the end-to-end tests of several boxes run in."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.boxes.network import Box, Direction, Network, network_or_skip

_PORT = 8000
# Sends some bytes to a server that counts them, and prints the seconds that it took.
_SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 8001), timeout=float(sys.argv[3])) as link:
    start = time.monotonic()
    link.sendall(bytes(int(sys.argv[2])))
    link.shutdown(socket.SHUT_WR)
    assert link.recv(1) == b"k"
    print(time.monotonic() - start)
"""
_RECEIVE = """
import socket
with socket.create_server(("", 8001)) as server:
    print("listens", flush=True)
    while True:
        link, _ = server.accept()
        with link:
            while link.recv(1 << 20):
                pass
            link.sendall(b"k")
"""
_NUM_SENT = 500_000


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with network_or_skip(tmp_path, "head", "worker") as network:
        yield network


def _listen(box: Box) -> None:
    box.start(sys.executable, "-I", "-S", "-c", _RECEIVE, log="receive.log")
    deadline = time.monotonic() + 30.0
    while "listens" not in (box.folder / "receive.log").read_text():
        assert time.monotonic() < deadline, (box.folder / "receive.log").read_text()
        time.sleep(0.02)


def _await_commands(box: Box, expected: set[str]) -> None:
    deadline = time.monotonic() + 30.0
    while (found := {" ".join(process.cmdline()) for process in box.processes()}) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def _send(box: Box, to: Box, num_bytes: int = 1000, timeout_s: float = 20.0) -> float | None:
    """The seconds that it took to send, or None if no answer came in time."""
    done = box.run(sys.executable, "-I", "-S", "-c", _SEND, to.address, str(num_bytes), str(timeout_s))
    if done.returncode != 0:
        assert "timed out" in done.stderr or "TimeoutError" in done.stderr, done.stderr
        return None
    return float(done.stdout)


def test_a_link_that_is_cut_drops_all_and_works_again_after_it(network: Network) -> None:
    head, worker = network["head"], network["worker"]
    _listen(head)
    assert _send(worker, head) is not None
    for direction in Direction.BOTH, Direction.OUT, Direction.IN:
        worker.cut(direction)
        assert _send(worker, head, timeout_s=0.3) is None
        worker.restore()
        assert _send(worker, head) is not None

    # One way: the packets arrive, the answers do not.
    received = head.link_nbytes()[1]
    worker.cut(Direction.IN)
    assert _send(worker, head, timeout_s=0.3) is None
    assert head.link_nbytes()[1] > received
    worker.restore()


def test_a_shaped_link_has_its_rate_and_counts_its_bytes(network: Network) -> None:
    head, worker = network["head"], network["worker"]
    _listen(head)
    sent, _ = worker.link_nbytes()
    worker.shape(8e6)  # 1 MB/s
    slow_s = _send(worker, head, _NUM_SENT)
    assert slow_s is not None
    assert slow_s > 0.8 * _NUM_SENT / 1e6
    assert _NUM_SENT < worker.link_nbytes()[0] - sent < 1.1 * _NUM_SENT
    # A cut does not take the rate away.
    worker.cut()
    worker.restore()
    slow_s = _send(worker, head, _NUM_SENT)
    assert slow_s is not None
    assert slow_s > 0.8 * _NUM_SENT / 1e6
    worker.shape(None)
    fast_s = _send(worker, head, _NUM_SENT)
    assert fast_s is not None
    assert fast_s < slow_s


def test_a_box_sees_only_what_is_its_own(network: Network) -> None:
    head, worker = network["head"], network["worker"]
    for folder in "/dev/shm", "/tmp":
        assert head.run("touch", f"{folder}/windlass-of-head").returncode == 0
        assert "windlass-of-head" not in worker.run("ls", folder).stdout
        assert not Path(folder, "windlass-of-head").exists()
        assert head.run("test", "-e", f"{folder}/windlass-of-head").returncode == 0
    assert worker.run("hostname").stdout == "worker\n"
    assert socket.gethostname() != "worker"
    head.start("sleep", "1001")
    pids = worker.run("sh", "-c", "ls /proc | grep -c '^[0-9]'").stdout
    assert int(pids) <= 5, "the processes of the head or of this machine are visible"


def test_a_port_of_a_box_is_reached_from_outside_while_its_link_is_cut_and_after_a_power_failure(
    network: Network,
) -> None:
    head = network["head"]
    (head.folder / "greeting").write_text("hello")
    serve = [sys.executable, "-m", "http.server", str(_PORT), "--bind", "127.0.0.1"]
    head.start(*serve)
    url = f"http://127.0.0.1:{head.forward(_PORT)}/greeting"
    head.cut()
    _await_greeting(url)
    head.switch_off()
    head.switch_on()
    head.start(*serve)
    _await_greeting(url)


def _await_greeting(url: str) -> None:
    deadline = time.monotonic() + 30.0
    with httpx.Client(trust_env=False) as client:
        while True:
            try:
                assert client.get(url).text == "hello"
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_processes_of_a_box_are_listed_killed_and_gone_with_its_power(network: Network) -> None:
    worker = network["worker"]
    # A detached process: its starter has ended.
    started = worker.run("sh", "-c", "setsid sleep 1002 >/dev/null 2>&1 & echo $!")
    detached = worker.process(int(started.stdout))
    beside = worker.start("sleep", "1003")
    _await_commands(worker, {"sleep 1002", "sleep 1003"})
    detached.send_signal(signal.SIGKILL)
    psutil.wait_procs([detached], 20.0)
    _await_commands(worker, {"sleep 1003"})
    worker.kill_all()
    assert beside.wait(20.0) != 0
    assert worker.processes() == []

    worker.run("sh", "-c", "echo kept > kept; echo lost > /dev/shm/lost; setsid sleep 1004 >/dev/null 2>&1 &")
    (process,) = worker.processes()
    worker.switch_off()
    assert not process.is_running()
    worker.switch_on()
    assert worker.run("cat", "kept").stdout == "kept\n"
    assert worker.run("test", "-e", "/dev/shm/lost").returncode == 1
    assert worker.run("touch", "/dev/shm/new").returncode == 0
    assert [path.name for path in worker.shared_memory.iterdir()] == ["new"]
    _listen(network["head"])
    assert _send(worker, network["head"]) is not None


_KILLED = """
import sys, time
from pathlib import Path
from tests.support.boxes.network import Network
network = Network(Path(sys.argv[1]), ("head", "worker"))
for box in network.boxes.values():
    box.run("sh", "-c", "setsid sleep 1005 >/dev/null 2>&1 &")
print(*(process.pid for box in network.boxes.values() for process in (*box.processes(), box.inside.init)), flush=True)
time.sleep(1000)
"""


def test_boxes_end_with_a_killed_test_process(network: Network, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path / "other")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as starter:
        assert starter.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        assert len(processes) == 4
        starter.kill()
    _, alive = psutil.wait_procs(processes, 20.0)
    assert alive == []
    # The boxes of another test process are not touched.
    assert all(box.inside.init.is_running() for box in network.boxes.values())


def test_closing_leaves_no_process_link_or_mount(tmp_path: Path) -> None:
    links, mounts = Path("/proc/net/dev"), Path("/proc/mounts")
    before = {line.split(":")[0] for line in links.read_text().splitlines()}, mounts.read_text()
    with network_or_skip(tmp_path, "head", "worker") as network:
        network["head"].run("sh", "-c", "setsid sleep 1006 >/dev/null 2>&1 &")
        found = [process for box in network.boxes.values() for process in (*box.processes(), box.inside.init)]
        network["worker"].cut()
    assert [process for process in found if process.is_running()] == []
    assert ({line.split(":")[0] for line in links.read_text().splitlines()}, mounts.read_text()) == before
