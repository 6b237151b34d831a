"""The simulated actors of a job. Each uses slots and resources as the real one does."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
