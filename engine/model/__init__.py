"""A model as blocks: cut, computed one by one, and checked against plain autograd."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
