"""Commands for API keys and the audit. They work on the database itself: who runs them owns the home."""

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from windlass.service.auth import KeyLimits, migrate_database, record_command
from windlass.service.cli.errors import CommandError, OptionError
from windlass.service.cli.service import Home
from windlass.service.cli.table import print_columns
from windlass.service.installation import Settings, keep_local_key, kept_key, load_settings
from windlass.service.validation import did_you_mean, near_names, plain_reason, report_database_errors
from windlass.storage.sql import ApiKey, AuditEvent, Database, NotFound
from windlass.storage.sql.repositories import AuditRepository, KeyRepository, Role, audit_id, is_active

_LOCAL_NAME = "cli"
_NAME = re.compile(r"[\w.@+ -]{1,64}")
_EXPIRY = re.compile(r"([1-9][0-9]{0,4})([hdwy])")
_UNITS_S = {"h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}


# What a key may ask for; where an option is left out, what settings say.
MostUrgentPriority = Annotated[
    int | None, typer.Option(help="The smallest number, which begins first, from -1000 to 1000.")
]
MaxRunningJobs = Annotated[int | None, typer.Option(help="How many of the user's jobs may run at once.")]
MaxWaitingJobs = Annotated[int | None, typer.Option(help="How many of the user's jobs may wait or be paused.")]
MaxFiles = Annotated[int | None, typer.Option(help="How many files are kept for the user.")]
MaxFileGib = Annotated[float | None, typer.Option(help="What they may take together, in GiB.")]
MaxStoredGib = Annotated[
    float | None, typer.Option(help="What the user's files and what their jobs leave may take together, in GiB.")
]
MaxWebhookEndpoints = Annotated[int | None, typer.Option(help="How many webhook endpoints the user may have.")]


def create(
    name: Annotated[str, typer.Option(help="What the key is called in lists.")],
    user: Annotated[
        str | None, typer.Option(help="Whose jobs and files are made with it (default: the key's name).")
    ] = None,
    role: Annotated[str, typer.Option(help="user sees what is the user's own; admin sees everything.")] = Role.USER,
    expires: Annotated[str | None, typer.Option(help="After how long: 12h, 90d, 4w, 1y (default: never).")] = None,
    most_urgent_priority: MostUrgentPriority = None,
    max_running_jobs: MaxRunningJobs = None,
    max_waiting_jobs: MaxWaitingJobs = None,
    max_files: MaxFiles = None,
    max_file_gib: MaxFileGib = None,
    max_stored_gib: MaxStoredGib = None,
    max_webhook_endpoints: MaxWebhookEndpoints = None,
    home: Home = None,
) -> None:
    """Make an API key and print it; it is shown this once only."""
    user = name if user is None else user
    for option, value in (("--name", name), ("--user", user)):
        if not _NAME.fullmatch(value) or value != value.strip():
            raise OptionError(f"{option} takes 1 to 64 letters, digits, spaces and . _ @ + -, got {value!r}")
    if role not in list(Role):
        raise OptionError(f"--role is {' or '.join(Role)}, got {role!r}")
    expires_at = None if expires is None else time.time() + _seconds(expires)
    limits = _limits(
        most_urgent_priority=most_urgent_priority,
        max_running_jobs=max_running_jobs,
        max_waiting_jobs=max_waiting_jobs,
        max_files=max_files,
        max_file_gib=max_file_gib,
        max_stored_gib=max_stored_gib,
        max_webhook_endpoints=max_webhook_endpoints,
    )
    settings = load_settings(home)
    with _database(settings) as database:
        is_first = not _has_working_key(settings, database)
        with database.write() as session:
            key, secret = KeyRepository(session).create(
                name=name, user=user, role=Role(role), expires_at=expires_at, limits=limits
            )
            record_command(session, "create_key", key.id)
            if is_first:
                # In the same transaction: from the first key on, the command line needs one, too.
                own, own_secret = KeyRepository(session).create(name=_LOCAL_NAME, user=_LOCAL_NAME, role=Role.ADMIN)
                record_command(session, "create_key", own.id)
                file = keep_local_key(settings.home, own_secret)
    print(secret)
    until = "" if expires_at is None else f", expires {_time(expires_at)}"
    _tell(f"{key.id} for user {user!r}, role {role}{until}. Keep it: it is not shown again.")
    if is_first:
        _tell(f"The command line of this machine has an admin key of its own, {own.id}, in {file}.")


def list_(home: Home = None) -> None:
    """List all keys, with what has become of them."""
    with _database(load_settings(home)) as database, database.read() as session:
        keys = KeyRepository(session).all()
    if not keys:
        print("no keys: the service answers to this machine only, without one; `windlass keys create` makes one")
        return
    header = ["key", "name", "user", "role", "state", "created", "last used"]
    has_limits = any(key.limits for key in keys)
    rows = [[*_row(key), *([_told_limits(key.limits)] if has_limits else [])] for key in keys]
    print_columns([[*header, *(["limits"] if has_limits else [])], *rows])


def limit(
    key: Annotated[str, typer.Argument(help="The key's id, as `windlass keys list` shows it.")],
    most_urgent_priority: MostUrgentPriority = None,
    max_running_jobs: MaxRunningJobs = None,
    max_waiting_jobs: MaxWaitingJobs = None,
    max_files: MaxFiles = None,
    max_file_gib: MaxFileGib = None,
    max_stored_gib: MaxStoredGib = None,
    max_webhook_endpoints: MaxWebhookEndpoints = None,
    reset: Annotated[bool, typer.Option("--reset", help="First forget all limits of the key's own.")] = False,
    home: Home = None,
) -> None:
    """Change what a key may ask for; what is left out stays. It holds from the next request on."""
    given = _limits(
        most_urgent_priority=most_urgent_priority,
        max_running_jobs=max_running_jobs,
        max_waiting_jobs=max_waiting_jobs,
        max_files=max_files,
        max_file_gib=max_file_gib,
        max_stored_gib=max_stored_gib,
        max_webhook_endpoints=max_webhook_endpoints,
    )
    with _database(load_settings(home)) as database, _known(database, key), database.write() as session:
        keys = KeyRepository(session)
        found = keys.get(key)
        limits = {**({} if reset else found.limits or {}), **given}
        role = found.role
        keys.set_limits(key, limits)
        record_command(session, "limit_key", key)
    print(f"{key}: {_told_limits(limits) or 'no limits of its own; those of the settings hold'}")
    if role == Role.ADMIN:
        _tell("It is an admin key: of these, only the limits of files hold for it.")


def revoke(
    key: Annotated[str, typer.Argument(help="The key's id, as `windlass keys list` shows it.")], home: Home = None
) -> None:
    """End a key and the logins made with it, at once."""
    with _database(load_settings(home)) as database:
        with _known(database, key), database.write() as session:
            KeyRepository(session).revoke(key)
            record_command(session, "revoke_key", key)
        with database.read() as session:
            is_needed = KeyRepository(session).is_needed()
    print(f"{key} is revoked")
    if not is_needed:
        print("it was the last one: the service answers to this machine only, without a key")


def audit(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many events.")] = 50, home: Home = None
) -> None:
    """Show who changed what, newest first."""
    with _database(load_settings(home)) as database, database.read() as session:
        rows = AuditRepository(session).page(limit=limit).rows
    if not rows:
        print("nothing was changed yet")
        return
    header = ("event", "time", "user", "key", "action", "what", "from", "result")
    print_columns([header, *(_audit_row(row) for row in rows)])


@contextmanager
def _database(settings: Settings) -> Iterator[Database]:
    migrate_database(settings)
    with report_database_errors(), closing(Database(settings.database_url)) as database:
        yield database


@contextmanager
def _known(database: Database, key: str) -> Iterator[None]:
    try:
        yield
    except NotFound:
        with database.read() as session:
            near = near_names(key, [each.id for each in KeyRepository(session).all()], separator="-")
        advice = did_you_mean(near, "`windlass keys list` shows the ids")
        raise CommandError(f"there is no key {key!r}; {advice}") from None


def _limits(**given: int | float | None) -> dict[str, Any]:
    try:
        return KeyLimits.model_validate(given).model_dump(exclude_none=True)
    except ValidationError as error:
        detail = error.errors()[0]
        option = str(detail["loc"][0]).replace("_", "-")
        raise OptionError(f"--{option}: {plain_reason(detail)}, got {detail['input']!r}") from None


def _told_limits(limits: dict[str, Any] | None) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in (limits or {}).items())


def _has_working_key(settings: Settings, database: Database) -> bool:
    secret = kept_key(settings.home)
    if secret is None:
        return False
    with database.read() as session:
        return KeyRepository(session).find(secret) is not None


def _seconds(expires: str) -> int:
    match = _EXPIRY.fullmatch(expires)
    if match is None:
        raise OptionError(f"--expires takes a number with h, d, w or y, such as 90d, got {expires!r}")
    return int(match[1]) * _UNITS_S[match[2]]


def _row(key: ApiKey) -> tuple[str, ...]:
    used = "never" if key.last_used_at is None else _time(key.last_used_at)
    return key.id, key.name, key.user, key.role, _state(key), _time(key.created_at), used


def _audit_row(row: AuditEvent) -> list[str]:
    who = (audit_id(row.ordinal), _time(row.created_at), row.user, row.key_id)
    return [cell or "" for cell in (*who, row.action, row.target, row.peer, row.result)]


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {_time(key.revoked_at)}"
    if key.expires_at is None:
        return "active"
    return f"{'active until' if is_active(key, time.time()) else 'expired'} {_time(key.expires_at)}"


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def _tell(line: str) -> None:
    """Beside the output: that is the key alone, for scripts."""
    typer.echo(line, err=True)
