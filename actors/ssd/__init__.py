"""The SSD server, which transfers chunks between one SSD and the arena, and who asks it for other actors."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
