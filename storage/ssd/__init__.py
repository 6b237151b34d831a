"""An SSD as a file or a raw device, its calibration, and its division into extents."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
