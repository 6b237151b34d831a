"""The question to the planner, the facts and profiles that it is answered from, and the form of an answer."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
