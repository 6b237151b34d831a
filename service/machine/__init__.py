"""The machine and its Ray: `windlass doctor`, the cluster, the node."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
