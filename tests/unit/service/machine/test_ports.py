"""Ports of a home's processes."""

import socket
from pathlib import Path

import psutil
import pytest

from windlass.service.installation.addresses import is_loopback
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


def test_port_of_a_link_is_no_problem_at_its_address_only(tmp_path: Path) -> None:
    lock = HomeLock(tmp_path)
    lock.acquire("http://127.0.0.1:1")
    host = _address_of_this_machine()
    with socket.create_server((host, 0)) as listener:
        what = f"port {host}:{listener.getsockname()[1]}"
        for link_host, is_problem in ((host, False), ("192.0.2.1", True)):
            found = {finding.what: finding for finding in check_ports(Settings(home=tmp_path, link_host=link_host))}
            assert (found[what].remedy is not None) == is_problem
    lock.release()


def _address_of_this_machine() -> str:
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not is_loopback(address.address):
                return str(address.address)
    pytest.skip("this machine has no address but loopback")
