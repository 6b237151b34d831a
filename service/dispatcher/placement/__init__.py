"""The place where each job begins: the capacity of each box, the queue's policy, and the choice of a box."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
