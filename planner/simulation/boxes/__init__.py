"""Simulates planned jobs over several boxes, with and without faults."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
