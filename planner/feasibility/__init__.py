"""Says whether a job fits, the least memory that it needs, and what it lacks."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
