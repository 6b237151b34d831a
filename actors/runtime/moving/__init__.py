"""Moves a job's states to a new division of its blocks among boxes."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
