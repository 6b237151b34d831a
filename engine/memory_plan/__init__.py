"""The plan that a job obeys: where states rest, how many buffers there are, what happens to activations."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
