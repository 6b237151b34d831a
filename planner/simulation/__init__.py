"""Simulates a plan with the scheduler's real policy, on resources with given rates."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
