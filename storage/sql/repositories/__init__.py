"""The repositories, which hold all SQL: one module for each kind of row."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
