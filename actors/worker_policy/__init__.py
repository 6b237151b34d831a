"""The decisions of workers that need no scheduler. No clock, no I/O, no Ray."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
