"""The HTTP API: the application, access control, error answers, and the feed of events."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
