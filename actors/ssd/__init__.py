"""The actor that moves chunks between one SSD and the arena, and the client that others ask it with."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
