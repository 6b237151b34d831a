"""The I/O scheduler of an SSD: the order of transfers, and the writes that a commit waits for."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
