"""Profiles of machines and shapes of models, from YAML files."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
