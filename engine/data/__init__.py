"""Training data: files of examples in, token files out, and the data set that maps them."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
