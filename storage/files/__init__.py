"""Writes files that survive a power loss, measures their real sizes, and describes how child processes ended."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
