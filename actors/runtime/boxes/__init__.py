"""The boxes of one job: the link between their actors, and the start and the end of an attempt over them."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
