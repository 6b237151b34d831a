"""Plans of one job over several boxes in stages: each box computes a run of the model's blocks."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
