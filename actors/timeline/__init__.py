"""Records, summarizes and exports the time spans and the memory of each resource in a step."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
