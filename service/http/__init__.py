"""HTTP servers: error answers, and bounds on connections and requests."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
