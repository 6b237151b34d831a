"""API keys: the caller of a request, the limits of a key, and the rule that an exposed service needs a key."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
