"""The box's side: joining, the agent that calls the head, and the files that it fetches and sends."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
