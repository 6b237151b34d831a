"""The link between the boxes of one job: each box pulls bytes from the others into memory that it has reserved.

`Link` has the whole: see docs/decisions/0050-the-link.md for the rules and for how it is used.
"""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
