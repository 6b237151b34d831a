"""The actor that computes: the block loop, its streams, and the buffers on the device."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
