"""Errors, and checks of users' input: settings, names, texts, numbers."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
