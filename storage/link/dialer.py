"""The connecting side: it makes the connections to peers that do not connect to this box."""

import contextlib
import socket
import time

from windlass.storage.link.errors import ProtocolError
from windlass.storage.link.peer import Peer
from windlass.storage.link.session import Connected
from windlass.storage.link.settings import Certificates, Identity, LinkSettings
from windlass.storage.link.wire import (
    HANDSHAKE_S,
    Codec,
    Keys,
    Refusal,
    connect_control,
    connect_data,
    expect_welcome,
    make_hello,
    receive_handshake,
    send_handshake,
)


class Dialer:
    """Connects to peers as this box."""

    def __init__(
        self, identity: Identity, settings: LinkSettings, certificates: Certificates, codec: Codec, instance: bytes
    ) -> None:
        """`instance`: random, of this link object."""
        self._identity = identity
        self._settings = settings
        self._context = certificates.context(is_server=False)
        self._codec = codec
        self._instance = instance

    def dial(self, peer: Peer, address: tuple[str, int]) -> Connected:
        """Makes all connections of a session. The caller closes them.

        Raises:
            OSError, EOFError: the peer cannot be reached, or is not the box of its name.
            LinkError: the peer refuses, or is another than before.
        """
        with contextlib.ExitStack() as failed:
            control = failed.enter_context(connect_control(address, peer.name, self._context))
            hello = make_hello(
                self._identity,
                self._settings,
                self._codec,
                to=peer.name,
                instance=self._instance,
                received=peer.received,
            )
            send_handshake(control, hello)
            answer = receive_handshake(control, time.monotonic() + 2 * HANDSHAKE_S)
            if isinstance(answer, Refusal):
                peer.confirm(answer.received)
            welcome = expect_welcome(answer)
            if not peer.is_instance(welcome.instance):
                raise ProtocolError("it was started anew within the attempt, so its state is lost")
            keys = Keys.agreed(self._identity, hello, welcome)
            data: list[socket.socket] = []
            for stream in range(self._settings.num_streams):
                data.append(failed.enter_context(connect_data(address, keys, stream)))
            failed.pop_all()
        return Connected(control=control, data=data, keys=keys, is_dialer=True, received=welcome.received)
