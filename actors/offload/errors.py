"""The errors of `windlass.offload`."""


class OffloadError(RuntimeError):
    """Base of the errors of `windlass.offload`."""


class CannotOffloadError(OffloadError):
    """The model or its optimizer cannot be offloaded with exact results; the text names the part and a remedy."""


class ParamsAwayError(OffloadError):
    """A layer's parameter was read outside the layer's forward, when its values are not in memory."""


class OffloadMisuseError(OffloadError):
    """The order of calls would give other results than plain PyTorch; the text names the setting that allows it."""


class OffloadClosedError(OffloadError):
    """The model was used after `close`."""


class OffloadFailedError(OffloadError):
    """A disk or a background thread failed, so training cannot continue. The cause is chained."""
