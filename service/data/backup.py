"""Backups of a home, made also while the service runs, and homes restored from them.

The database is copied first, then journals, then models and files. So everything that a row or a record names existed
before the row. Objects deleted during the copy are removed from the database when a home is restored. Backups contain
no model states on SSDs.
"""

import json
import os
import shutil
import sqlite3
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError

from windlass.actors.job import read_journal
from windlass.engine.checkpoint import copy_file
from windlass.service.data.job_remains import last_attempts
from windlass.service.installation import (
    KEY_FILE,
    Settings,
    load_settings,
    mark_restored,
    node_of,
    place_of_home,
    prepare_home,
)
from windlass.service.jobs import journal_path
from windlass.service.machine import TOKEN_FILE
from windlass.service.validation import ReportedError, told_jobs
from windlass.storage.sql import ACTIVE_STATUSES, Database, migrate
from windlass.storage.sql.repositories import DeletionRepository, FileRepository, JobRepository

_FORMAT = 1
_MANIFEST = "backup.json"
_HOME = "home"
_DATABASE = "windlass.db"
# Entries of the home that a backup omits. They are rebuilt, or belong to running processes, or are copied in another
# way.
_LEFT_OUT = (_DATABASE, f"{_DATABASE}-wal", f"{_DATABASE}-shm", "logs", "kernels", "ray.json", TOKEN_FILE)
# Those that boxes and their heads fetch, compute or write again.
_LEFT_OUT_OF_BOXES = ("blobs", "incoming", "digests", "hold.json", "answered.json", "instructions.json")
# Suffixes omitted in any folder: locks, and files that are partly written or partly removed.
_LEFT_OUT_SUFFIXES = (".lock", ".part", ".partial", ".deleted")
_FIRST = "jobs"  # copied first, because journals name models that must be copied after them


class BackupError(ReportedError):
    """A backup cannot be made, or no home can be restored from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A new backup or home."""

    home: Path
    nbytes: int
    remarks: tuple[str, ...]  # notes for the user


def make_backup(
    settings: Settings, destination: Path, *, with_base_models: bool = True, with_local_key: bool = False
) -> Copied:
    """Copies a home to a folder, which appears only when the copy is complete. Raises BackupError.

    `with_local_key`: also copies the API key of this machine's command line. Every reader of the backup can then use
    the service.
    """
    if not settings.home.is_dir():
        raise BackupError(f"there is no home {settings.home}")
    remarks = []
    with _new_folder(destination, outside=settings.home) as folder:
        database = _sqlite_path(settings)
        if database is None:
            remarks.append(
                "the database is not in it: it is PostgreSQL's; take it with pg_dump just before (docs/operation.md)"
            )
        else:
            _copy_sqlite(database, folder / _DATABASE)
        left_out = {path.resolve() for path in settings.ssd_dirs}
        if not with_base_models:
            left_out.add(settings.models_dir.resolve())
        elif not settings.models_dir.resolve().is_relative_to(settings.home.resolve()):
            remarks.append(f"base models are not in it: they lie in {settings.models_dir}, outside of the home")
        if not with_local_key and (settings.home / KEY_FILE).exists():
            left_out.add((settings.home / KEY_FILE).resolve())
            remarks.append(
                "the API key of this machine's command line is not in it; copy it with --local-key, or make another "
                "with `windlass keys create`"
            )
        nbytes = _copy_home(settings.home, folder / _HOME, left_out)
        about = {
            "format": _FORMAT,
            "windlass": version("windlass"),
            "created_at": time.time(),
            "home": str(settings.home),
            "has_database": database is not None,
        }
        (folder / _MANIFEST).write_text(json.dumps(about, indent=1))
        os.sync()
    return Copied(home=destination, nbytes=nbytes, remarks=tuple(remarks))


def restore_backup(source: Path, home: Path | None = None) -> Copied:
    """Makes a new home from a backup and upgrades its database to this version. Raises BackupError."""
    about, home = _read_manifest(source), place_of_home(home)
    if home.exists() and any(home.iterdir()):
        raise BackupError(f"{home} is not empty; move it away first, or choose another with --home")
    with suppress(FileNotFoundError):
        home.rmdir()
    with _new_folder(home) as folder:
        nbytes = _copy_tree(source / _HOME, folder, lambda _path: False)
        if about["has_database"]:
            shutil.copyfile(source / _DATABASE, folder / _DATABASE)
            (folder / _DATABASE).chmod(0o600)
        mark_restored(folder)
    try:
        settings = load_settings(home)
        remarks = _reconcile_database(settings, about)
        prepare_home(home)
    except BaseException:
        shutil.rmtree(home)
        raise
    return Copied(home=home, nbytes=nbytes, remarks=tuple(remarks))


# --- copying ----------------------------------------------------------------------------------------------------------


@contextmanager
def _new_folder(destination: Path, outside: Path | None = None) -> Iterator[Path]:
    """Yields a temporary folder.

    It is renamed to `destination` at the end of the `with` block, or deleted if the block raises.
    """
    destination = destination.expanduser().absolute()
    if destination.exists():
        raise BackupError(f"{destination} exists already; choose a new folder")
    if outside is not None and destination.resolve().is_relative_to(outside.resolve()):
        raise BackupError(f"{destination} lies in the home itself; choose a folder elsewhere, best on another disk")
    partial = destination.with_name(f".{destination.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir(mode=0o700, parents=True)
        try:
            yield partial
            partial.rename(destination)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise BackupError(f"{destination} could not be made: {error}") from error


def _sqlite_path(settings: Settings) -> Path | None:
    url = make_url(settings.database_url)
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def _copy_sqlite(source: Path, target: Path) -> None:
    """Copies a consistent state of the database, also while other processes write to it."""
    if not source.is_file():
        raise BackupError(f"there is no database {source}; nothing was ever stored here")
    target.touch(mode=0o600)
    try:
        with closing(sqlite3.connect(source)) as database, closing(sqlite3.connect(target)) as copy:
            database.backup(copy)
    except sqlite3.Error as error:
        raise BackupError(f"{source} could not be copied: {error}") from error


def _copy_home(home: Path, target: Path, left_out: set[Path]) -> int:
    def is_left_out(path: Path) -> bool:
        if path.parent == home and path.name in (*_LEFT_OUT, *_LEFT_OUT_OF_BOXES):
            return True
        return path.suffix in _LEFT_OUT_SUFFIXES or path.resolve() in left_out

    target.mkdir(mode=0o700)
    nbytes = 0
    for path in sorted(home.iterdir(), key=lambda path: (path.name != _FIRST, path.name)):
        if not is_left_out(path):
            nbytes += _copy_any(path, target / path.name, is_left_out)
    return nbytes


def _copy_any(source: Path, target: Path, is_left_out: Callable[[Path], bool]) -> int:
    """Copies a file, a link or a folder, and returns the bytes. The caller handles a path that vanishes meanwhile."""
    mode = source.lstat().st_mode
    if stat.S_ISLNK(mode):
        target.symlink_to(source.readlink())
    elif stat.S_ISDIR(mode):
        return _copy_tree(source, target, is_left_out)
    elif stat.S_ISREG(mode):
        copy_file(source, target)
        shutil.copystat(source, target)
        return target.stat().st_size
    return 0


def _copy_tree(source: Path, target: Path, is_left_out: Callable[[Path], bool]) -> int:
    target.mkdir(mode=0o700, exist_ok=True)
    nbytes = 0
    for path in sorted(source.iterdir()):
        if is_left_out(path):
            continue
        try:
            nbytes += _copy_any(path, target / path.name, is_left_out)
            path.lstat()  # raises FileNotFoundError if it was removed during the copy
        except FileNotFoundError:
            _forget(target / path.name)
    shutil.copystat(source, target)
    return nbytes


def _forget(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- preparing a restored home ----------------------------------------------------------------------------------------


def _read_manifest(source: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((source / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise BackupError(f"{source} is no backup that `windlass backup` made: {error}") from None
    if about.get("format") != _FORMAT:
        raise BackupError(
            f"{source} has format {about.get('format')} and this version of windlass reads format {_FORMAT}; use the "
            f"version that made it, {about.get('windlass')}, or a later one"
        )
    return about


def _reconcile_database(settings: Settings, about: dict[str, Any]) -> list[str]:
    """Makes the database agree with the copied files. Returns notes for the user."""
    is_own = about["has_database"]
    if is_own and _sqlite_path(settings) != settings.home / _DATABASE:
        raise BackupError(
            "the settings name another database than the backup has; leave `database_url` out while it is restored"
        )
    try:
        migrate(settings.database_url)
        database = Database(settings.database_url)
        try:
            if is_own:
                _forget_what_is_not_there(database, settings)
            unfinished = _raise_attempts(database, settings)
        finally:
            database.close()
    except OperationalError as error:
        raise BackupError(f"the database does not answer; restore it first: {error.orig}") from error
    if not unfinished:
        return []
    return [
        f"not finished: {told_jobs(unfinished)}. Those that had begun go on where the SSDs still hold their "
        "states; else they are paused, and can be submitted again"
    ]


def _forget_what_is_not_there(database: Database, settings: Settings) -> None:
    """Removes the rows of files and checkpoints that were deleted after the database was copied."""
    with database.write() as session:
        files = FileRepository(session)
        for file_id in files.all_ids():
            if not (settings.files_dir / file_id).is_file():
                files.delete(file_id)
        DeletionRepository(session).forget_checkpoints(lambda model: (settings.fine_tuned_dir / model).is_dir())


def _raise_attempts(database: Database, settings: Settings) -> list[str]:
    """Raises the attempts of unfinished jobs to the last ones seen in journals or on SSDs. Returns the jobs' ids.

    Attempts may have begun after the database was copied.
    """
    with database.read() as session:
        jobs = JobRepository(session).with_status(*ACTIVE_STATUSES, node=node_of(settings.home))
    on_ssds = last_attempts(settings)
    for job in jobs:
        told = (record.attempt for record in read_journal(journal_path(settings, job.id)))
        last = max(job.attempt, on_ssds.get(job.id, 0), *told, 0)
        if last > job.attempt:
            with database.write() as session:
                JobRepository(session).set_fields(job.id, attempt=last)
    return [job.id for job in jobs]
