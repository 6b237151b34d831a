"""API keys: who calls, what a key may ask for, and when the service must ask for one."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
