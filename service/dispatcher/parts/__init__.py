"""Jobs over several boxes: the head gives each box a part, and a box serves the attempts of its parts."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
