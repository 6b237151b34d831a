"""Models whose facts are known without tracing them: formulas in their sizes, recorded from traces of small models."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
