"""A box's end of links: a port that is reserved stays free for the link, and for nothing else."""

import socket

import pytest

from windlass.service.machine.fleet.link_endpoint import LinkPortError, reserve_link_port
from windlass.storage.link import listen

HOST = "127.0.0.1"


def test_reserved_port_is_for_the_link_alone() -> None:
    with reserve_link_port(HOST, None) as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))
        with pytest.raises(LinkPortError, match=f"no port of link_ports {port}-{port} is free at {HOST}"):
            reserve_link_port(HOST, range(port, port + 1))
        with listen(HOST, port) as listener, socket.create_connection((HOST, port)) as client:
            connection, _ = listener.accept()
            connection.close()
            assert client.recv(1) == b""


def test_ports_in_use_are_passed_over() -> None:
    with reserve_link_port(HOST, None) as first:
        start = first.getsockname()[1]
        with reserve_link_port(HOST, range(start, min(start + 50, 65536))) as second:
            assert second.getsockname()[1] > start


def test_address_of_another_machine_is_told() -> None:
    with pytest.raises(LinkPortError, match=r"no port is free at 192\.0\.2\.1 .*check link_host"):
        reserve_link_port("192.0.2.1", None)
