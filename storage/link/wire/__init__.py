"""The bytes of the link on the network: control messages, data frames, and the handshakes of connections."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
