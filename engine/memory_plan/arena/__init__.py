"""Makes a plan of a job's memory: the arena that fits the budget, divided into slots."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
