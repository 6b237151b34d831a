"""The boxes of a service, the jobs that they work on, and their parts of jobs over several boxes."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
