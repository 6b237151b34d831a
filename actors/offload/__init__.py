"""`windlass.offload`: a plain PyTorch loop with its layers' params and optimizer states in host memory or on SSDs."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
