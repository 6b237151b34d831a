"""Partitions a model into blocks, computes them one by one, and checks this against plain autograd."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
