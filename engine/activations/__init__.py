"""Decides for each saved tensor whether it is kept, swapped or recomputed, and carries the decision out."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
