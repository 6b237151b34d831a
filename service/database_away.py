"""A database that cannot be used, told in one line to who starts or ends the service."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError

from windlass.service.reported_error import ReportedError
from windlass.storage.sql.database import why_unavailable
from windlass.storage.sql.errors import DamagedDatabase


class DatabaseAwayError(ReportedError):
    """The database does not answer, is locked, or its disk is full; or its file is damaged."""


@contextmanager
def telling_of_database() -> Iterator[None]:
    """Raises DatabaseAwayError where the block fails as the database cannot be used."""
    try:
        yield
    except DamagedDatabase as error:
        raise DatabaseAwayError(
            f"{error}; end the service, move its home away, and bring a backup back with `windlass restore`"
        ) from error
    except SQLAlchemyError as error:
        if (why := why_unavailable(error)) is None:
            raise
        detail = " ".join(str(getattr(error, "orig", None) or error).split())
        raise DatabaseAwayError(f"the database cannot be used: {why} ({detail}); try again when it can") from error
