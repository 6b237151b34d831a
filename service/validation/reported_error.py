"""What the command line and the service's processes tell people in one line, instead of a traceback."""

ERROR_PREFIX = "error: "


class ReportedError(RuntimeError):
    """Something that people can do something about; the message says what is wrong and what to do."""
