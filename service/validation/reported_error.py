"""The base class of errors that are reported in one line, without a traceback."""

ERROR_PREFIX = "error: "


class ReportedError(RuntimeError):
    """An error that the user can fix. The message says what is wrong and what to do."""
