"""Frees the states on SSDs of a job that no database knows.

Only a user may request it, because another installation may need them.
"""

from contextlib import closing

from windlass.service.auth import migrate_database, record_command
from windlass.service.cli.errors import CommandError
from windlass.service.data import free_states, states_nbytes
from windlass.service.installation import Settings
from windlass.service.jobs import ARENA_DIR
from windlass.storage.ids import JobId
from windlass.storage.memory import arenas_in
from windlass.storage.sql import Database
from windlass.storage.sql.repositories import JobRepository


def free_unknown_states(settings: Settings, job: JobId) -> int:
    """Frees the states of a job that is not of this installation. Returns the freed bytes.

    Raises:
        CommandError: the job is known here, or runs on this machine, or no present SSD holds its states.
    """
    migrate_database(settings)
    with closing(Database(settings.database_url)) as database:
        with database.read() as session:
            is_known = JobRepository(session).find(job) is not None
        if is_known:
            raise CommandError(
                f"job {job} is known here, and its states are its own; `windlass delete {job}` deletes it"
            )
        if job in arenas_in(ARENA_DIR):
            raise CommandError(
                f"job {job} runs on this machine and belongs to another installation; its states are not freed"
            )
        nbytes = states_nbytes(settings).get(job)
        if nbytes is None:
            raise CommandError(f"none of {', '.join(map(str, settings.ssd_dirs))} holds states of job {job}")
        with database.write() as session:  # written first, so that no states are freed without an audit event
            record_command(session, "free_unknown_states", job)
    free_states(settings, job)
    return nbytes
