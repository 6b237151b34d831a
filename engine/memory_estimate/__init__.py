"""Estimates of the memory that a model's layers take on the device, by dry runs without data."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
