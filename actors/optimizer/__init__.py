"""The CPU optimizer, which updates chunks, and loads and exports the model."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
