"""Boxes that work for one service: how they join, what they call, and the head's side of it."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
