"""The stored data of this installation: disk usage, deletion and backups."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
