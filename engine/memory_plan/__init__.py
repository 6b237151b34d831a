"""The plan that a job obeys: the places of states, the number of buffers, and the policies for activations."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
