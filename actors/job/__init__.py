"""The facts about one job that its actors share: its specification, its limits, and its journal."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
