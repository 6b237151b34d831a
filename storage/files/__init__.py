"""Files that survive a power loss, their real sizes, and how child processes ended."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
