"""Starts actors and connects them: on Ray, or in one process."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
