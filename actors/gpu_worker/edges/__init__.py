"""The ends of a GPU worker for all that passes between boxes: hidden states, their gradients, and shared params."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
