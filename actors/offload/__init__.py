"""`windlass.offload`: a plain PyTorch loop whose layers' params and optimizer states rest in memory or on SSDs."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
