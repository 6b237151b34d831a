"""Counts what the links of a process do."""

from collections import Counter
from dataclasses import dataclass, field

import pytest

from windlass.storage.ids import BoxName
from windlass.storage.link.peer import Connections, Peer


@dataclass(frozen=True, kw_only=True)
class LinkCounts:
    """The connections to each peer, the first included, and the bytes of data that began to go there."""

    num_connections: Counter[BoxName] = field(default_factory=Counter)
    nbytes_out: Counter[BoxName] = field(default_factory=Counter)


def count_links(patch: pytest.MonkeyPatch) -> LinkCounts:
    """Counts from now on."""
    counts = LinkCounts()
    connected, next_piece = Peer.connected, Peer.next_piece

    def counting_connected(self: Peer, connections: Connections, received: int) -> None:
        counts.num_connections[self.name] += 1
        connected(self, connections, received)

    def counting_next_piece(self: Peer, connections: Connections) -> tuple[int, memoryview] | None:
        taken = next_piece(self, connections)
        if taken is not None:
            counts.nbytes_out[self.name] += taken[1].nbytes
        return taken

    patch.setattr(Peer, "connected", counting_connected)
    patch.setattr(Peer, "next_piece", counting_next_piece)
    return counts
