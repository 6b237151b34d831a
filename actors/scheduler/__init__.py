"""The actor that runs the policy, keeps the progress, and writes the journal."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
