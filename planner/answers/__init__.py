"""Answers questions about plans: in processes of their own, and for a job or a machine with one thing changed."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
