"""Measures a machine and a model's blocks, and stores the times."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
