"""Model folders in Hugging Face's format: read, checked, initialized, and written."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
