"""Estimates the device memory of a model's layers by dry runs without data."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
