"""The sockets of handshakes that fail."""

import select
import socket
import struct
from pathlib import Path

import pytest

from tests.support.storage.links import WAIT_S, Authority
from tests.support.storage.open_sockets import no_socket_is_dropped
from windlass.storage.ids import BoxName
from windlass.storage.link import server_name

LEFT = BoxName("left")


def reset_pair() -> socket.socket:
    """Returns a connected socket whose peer has reset the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), timeout=WAIT_S)
        far, _ = listener.accept()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
    ended = select.poll()
    ended.register(near, 0)
    assert ended.poll(WAIT_S * 1000)
    return near


@pytest.mark.parametrize("is_server", [False, True])
def test_socket_that_is_reset_before_tls_begins_is_closed(tmp_path: Path, is_server: bool) -> None:
    context = Authority(tmp_path).certificates("left").context(is_server=is_server)
    with no_socket_is_dropped(), reset_pair() as raw, pytest.raises(ConnectionResetError):
        context.wrap_socket(raw, server_side=is_server, server_hostname=None if is_server else server_name(LEFT))
