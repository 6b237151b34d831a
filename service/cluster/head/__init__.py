"""The head's side: the server that boxes call, the reports that it stores, and the files that it sends."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
