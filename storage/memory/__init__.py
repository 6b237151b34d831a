"""Shared memory: arenas, their slots and pages, NUMA nodes, and the space that is left."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
