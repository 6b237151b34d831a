"""The right to call as a box: the certificate authority of a head, join codes, and certificates."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
