"""The sizes of the parts in which the head goes over a micro-batch."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
