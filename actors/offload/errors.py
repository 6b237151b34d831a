"""What `windlass.offload` refuses, and how it fails."""


class OffloadError(RuntimeError):
    """Base of all below."""


class CannotOffloadError(OffloadError):
    """The model or its optimizer cannot be offloaded exactly; the text says which part of it, and what to do."""


class ParamsAwayError(OffloadError):
    """A layer's parameter was read while its layer does not run: its values are not in memory then."""


class OffloadMisuseError(OffloadError):
    """Calls in an order whose result would differ from plain PyTorch's; the text names the setting that allows it."""


class OffloadClosedError(OffloadError):
    """The model was used after `close`."""


class OffloadFailedError(OffloadError):
    """A disk or a background thread failed; training cannot go on. The cause is chained."""
