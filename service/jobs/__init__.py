"""Facts that the service derives from a job's row: its specification, its plan, its files."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
