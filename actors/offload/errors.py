"""The errors of `windlass.offload`, and the token whose waits raise them."""

from collections.abc import Callable

from windlass.storage.cancellation import CancelToken


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


class OffloadToken(CancelToken):
    """A token whose waits raise OffloadFailedError."""

    _failure: Exception | None = None
    describe_pending: Callable[[], str] = staticmethod(lambda: "")  # the transfers of the SSDs that are not done

    def fail(self, error: Exception) -> None:
        """Records an error, which present and later waits raise. Only the first one counts."""
        self._failure = self._failure or error
        self.cancel()

    def _stopped(self) -> Exception:
        if self._failure is None:
            return OffloadClosedError("the model was closed")
        failed = OffloadFailedError(f"training cannot go on: {self._failure}")
        failed.__cause__ = self._failure
        return failed

    def _overdue(self, what: str) -> Exception:
        pending = self.describe_pending() or "no transfer is pending"
        return OffloadFailedError(f"{super()._overdue(what)}; a disk hangs or is too slow; {pending}")
