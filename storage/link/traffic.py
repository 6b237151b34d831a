"""The account of a peer's traffic."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Traffic:
    """The traffic with one peer since the start."""

    nbytes_in: int = 0  # data that arrived, without headers
    nbytes_out: int = 0
    num_connections: int = 0  # that were made, the first included
