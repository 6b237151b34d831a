"""Brings the params of a block to the device in pieces, each only while it is used."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
