"""Costs that plans are made of: profiles of models, rates of machines, and the options for activations."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
