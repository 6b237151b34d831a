"""Conversations: rendered by a model's chat template, checked, and marked with what is learned."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
