"""Says how sure a prediction is, and corrects the planner's rates by measured steps."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
