"""The rule that a service which other machines can reach needs an API key."""

from contextlib import closing

from windlass.service.installation import Settings, prepare_home
from windlass.service.validation import ReportedError, report_database_errors
from windlass.storage.sql import Database, check_whole, migrate
from windlass.storage.sql.repositories import KeyRepository


class UnprotectedError(ReportedError):
    """Other machines could reach the service, but it has no API key."""


def prepare_database(settings: Settings) -> None:
    """Upgrades the home's database to this version.

    Raises UnprotectedError if a service with these settings must not start without a key, and DatabaseUnavailableError.
    """
    migrate_database(settings)
    with report_database_errors(), closing(Database(settings.database_url)) as database:
        require_auth_if_exposed(settings, database)


def migrate_database(settings: Settings) -> None:
    """Upgrades the database without requiring a key, for commands and processes beside the service."""
    prepare_home(settings.home)
    with report_database_errors():
        check_whole(settings.database_url, has_rows=settings.jobs_dir.exists() and any(settings.jobs_dir.iterdir()))
        migrate(settings.database_url)


def require_auth_if_exposed(settings: Settings, database: Database) -> None:
    """Raises UnprotectedError if other machines can reach the service and no API key is active."""
    if not settings.is_for_others:
        return
    with database.read() as session:
        if KeyRepository(session).has_active():
            return
    raise UnprotectedError(
        f"other machines could reach the service ({settings.why_for_others}), and there is no API key; make one with "
        "`windlass keys create --name NAME --role admin`, or serve this machine only (host 127.0.0.1)"
    )
