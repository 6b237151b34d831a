"""The device that computes: its choice, its streams, its buffers, and the processors' thread settings."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
