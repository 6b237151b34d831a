"""The spans of time and the memory that each resource took in a step, recorded, summed and exported."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
