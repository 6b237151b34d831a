"""A report of database errors in one line, for the user who starts or ends the service."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError

from windlass.service.validation.reported_error import ReportedError
from windlass.storage.sql import DamagedDatabase, why_unavailable


class DatabaseUnavailableError(ReportedError):
    """The database does not answer, is locked, is damaged, or its disk is full."""


@contextmanager
def report_database_errors() -> Iterator[None]:
    """Raises DatabaseUnavailableError if the `with` block fails because the database is unavailable."""
    try:
        yield
    except DamagedDatabase as error:
        raise DatabaseUnavailableError(
            f"{error}; end the service, move its home away, and bring a backup back with `windlass restore`"
        ) from error
    except SQLAlchemyError as error:
        if (why := why_unavailable(error)) is None:
            raise
        detail = " ".join(str(getattr(error, "orig", None) or error).split())
        raise DatabaseUnavailableError(
            f"the database cannot be used: {why} ({detail}); try again when it can"
        ) from error
