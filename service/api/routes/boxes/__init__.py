"""The calls about the boxes of a service, and what they show of each box."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
