"""Integer programs with few kinds of blocks: their form, bounds of their values, and their solutions."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
