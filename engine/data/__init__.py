"""Training data: reads files of examples, writes token files, and maps these as a data set."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
