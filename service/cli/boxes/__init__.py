"""Commands for the boxes of a service, and units with which systemd starts them."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
