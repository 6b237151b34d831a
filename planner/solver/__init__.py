"""The integer programs that choose where states are resident and what is recomputed."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
