"""Linear layers and embeddings that are computed in parts of their matrix."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
