"""The actor that reads params from the SSDs into the slots from which all GPU workers of a box copy them."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
