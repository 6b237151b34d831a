"""The integer programs that choose where states rest and what is computed again."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
