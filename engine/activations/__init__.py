"""Decides for each saved tensor whether it is kept, swapped or computed again, and does so."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
