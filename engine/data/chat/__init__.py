"""Renders conversations by a model's chat template, checks them, and marks the characters to learn."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
