"""Ports of a home's processes."""

import socket
from pathlib import Path

from windlass.service.installation.home import HomeLock
from windlass.service.installation.settings import Settings
from windlass.service.machine.ports import check_ports


def test_ports_that_others_reach_are_problems_and_those_of_loopback_are_not(tmp_path: Path) -> None:
    lock = HomeLock(tmp_path)
    lock.acquire("http://127.0.0.1:1")  # this process counts as the home's supervisor
    with socket.create_server(("127.0.0.1", 0)) as inner, socket.create_server(("0.0.0.0", 0)) as outer:
        found = {finding.what: finding for finding in check_ports(Settings(home=tmp_path))}
        assert found[f"port 127.0.0.1:{inner.getsockname()[1]}"].remedy is None
        assert found[f"port 0.0.0.0:{outer.getsockname()[1]}"].remedy is not None
    lock.release()
