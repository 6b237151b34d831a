"""Prepares jobs: downloads and checks the model, prepares the data, makes the plan."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
