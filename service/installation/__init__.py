"""This installation: its settings, its home, its logs, its machine, and a client of its service."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
