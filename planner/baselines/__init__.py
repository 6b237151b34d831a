"""Step times and swap amounts of other systems, by their published policies."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
