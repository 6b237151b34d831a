"""Stores activations between the forward and the backward pass: on the host, and on the SSDs."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
