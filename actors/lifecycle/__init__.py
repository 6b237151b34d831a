"""The life of an actor's threads and processes: their names, cores, locks, and stop requests."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
