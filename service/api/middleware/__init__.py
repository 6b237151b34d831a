"""Limits and headers of every request: connections, rates, turns of users, hidden paths."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
