"""The errors of the link. Every message names the peer, and the key where there is one."""


class LinkError(RuntimeError):
    """The link cannot do what was asked of it."""


class LinkClosed(LinkError):
    """This box's own link was closed."""


class PeerLost(LinkError, ConnectionError):
    """A peer was silent for too long, or broke the protocol. It does not come back in this attempt."""


class PeerClosed(LinkError, ConnectionError):
    """A peer has closed its link in order, with this transfer still open. It does not come back in this attempt."""


class PullOverdue(LinkError, TimeoutError):
    """A pull did not end before its deadline. Its buffer belongs to the link until that is closed."""


class Refused(LinkError):
    """A peer refused a connection, and said why."""


class ProtocolError(LinkError):
    """A peer sent what the protocol does not allow, such as a frame that nothing asked for."""
