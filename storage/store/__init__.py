"""The tensor store: copy-on-write states of chunks, commits, and scratch space."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
