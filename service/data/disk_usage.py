"""Sizes of stored things on disks, as file systems count them: allocated blocks, in bytes."""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from windlass.actors.job import JOURNAL_FILE
from windlass.actors.timeline import FOLDER as TIMELINE_FOLDER
from windlass.service.data.job_remains import output_dir, states_nbytes
from windlass.service.installation import Settings, node_of
from windlass.service.jobs import job_dir
from windlass.service.validation import ApiError, is_fine_tuned_id, job_id_prefix
from windlass.storage.sql import Database, Job
from windlass.storage.sql.repositories import Stored, StoredRepository

_BLOCK_NBYTES = 512  # what st_blocks counts, whatever the file system's own are
_STEP = "-step-"
# Of a job's folder.
_PARTS = {"dataset": "dataset", JOURNAL_FILE: "journal", TIMELINE_FOLDER: "timeline"}
_OTHER = "other"
# Of the home.
_OF_THE_HOME = {"database": "windlass.db*", "logs": "logs", "kernels": "kernels"}
_OF_BOXES = {"contents from the head": "blobs", "uploads of boxes": "incoming"}


class Kind(StrEnum):
    """The kinds of things that occupy disks."""

    JOB = "job"  # its folder: prepared data, journal, timeline
    STATES = "states"  # a job's model states, on SSDs
    CHECKPOINT = "checkpoint"
    MODEL = "model"  # fine-tuned
    FILE = "file"
    BASE_MODEL = "base_model"
    SERVICE = "service"  # of the installation itself


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """One thing."""

    kind: Kind
    id: str
    nbytes: int


class Tally:
    """Adds up files and folders. A file that has several names counts where it is met first."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()  # of those with several names: device and inode

    def nbytes(self, path: Path) -> int:
        """Returns the bytes of a file, or of a folder with all below it; 0 if there is none. Links are not followed."""
        try:
            found = path.lstat()
        except FileNotFoundError:
            return 0
        return self._of(found) + (self._below(path) if stat.S_ISDIR(found.st_mode) else 0)

    def _below(self, folder: Path | str) -> int:
        found = 0
        with suppress(FileNotFoundError), os.scandir(folder) as entries:  # what is removed meanwhile occupies nothing
            for entry in entries:
                with suppress(FileNotFoundError):
                    found += self._of(entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        found += self._below(entry.path)
        return found

    def _of(self, found: os.stat_result) -> int:
        if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
            if (found.st_dev, found.st_ino) in self._seen:
                return 0
            self._seen.add((found.st_dev, found.st_ino))
        return found.st_blocks * _BLOCK_NBYTES


def parts_of_job(settings: Settings, job: Job, states: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes that a job occupies, by part. `states`: bytes on SSDs by job.

    A checkpoint that became the job's model counts as the model.
    """
    tally = Tally()
    parts = dict.fromkeys((*_PARTS.values(), _OTHER), 0)
    for path in _entries(job_dir(settings, job.id)):
        parts[_PARTS.get(path.name, _OTHER)] += tally.nbytes(path)
    parts["states"] = states.get(job.id, 0)
    with suppress(ApiError):  # there is no model under a name that is none
        model = output_dir(settings, job)
        parts["model"] = tally.nbytes(model)
        parts["checkpoints"] = sum(tally.nbytes(each) for each in model.parent.glob(f"{model.name}{_STEP}*"))
    parts["result_files"] = sum(tally.nbytes(settings.files_dir / each) for each in job.result_files)
    return parts


def all_that_occupies(
    settings: Settings, states: Mapping[str, int], *, jobs: frozenset[str] | None, files: frozenset[str] | None
) -> list[DiskUsage]:
    """All things of this home, the largest first.

    `jobs`, `files`: the ids of those of one user; else everything there is, the installation's own included.
    """
    tally = Tally()
    found = [DiskUsage(kind=Kind.STATES, id=job, nbytes=nbytes) for job, nbytes in states.items() if _is_in(job, jobs)]
    found += _of_folder(tally, Kind.JOB, settings.jobs_dir, jobs)
    found += _of_folder(tally, Kind.FILE, settings.files_dir, files)
    found += _of_models(tally, settings.fine_tuned_dir, jobs)
    if jobs is None:
        found += _of_base_models(tally, settings.models_dir)
        for name, pattern in _OF_THE_HOME.items():
            nbytes = sum(tally.nbytes(path) for path in settings.home.glob(pattern))
            found.append(DiskUsage(kind=Kind.SERVICE, id=name, nbytes=nbytes))
        for name, folder in _OF_BOXES.items():  # after the models, whose files are hard links of these
            if nbytes := tally.nbytes(settings.home / folder):
                found.append(DiskUsage(kind=Kind.SERVICE, id=name, nbytes=nbytes))
    return sorted(found, key=lambda each: (-each.nbytes, each.kind, each.id))


def measure_stored(database: Database, settings: Settings) -> None:
    """Writes what users' jobs occupy in this home into the database, where requests read it."""
    with database.read() as session:
        owners = StoredRepository(session).owners()
    by_prefix = {_prefix_of(job): job for job in owners}
    found = []
    for each in all_that_occupies(settings, states_nbytes(settings), jobs=frozenset(owners), files=frozenset()):
        job = each.id if each.kind in (Kind.JOB, Kind.STATES) else by_prefix[job_id_prefix(each.id) or ""]
        found.append(Stored(kind=each.kind, name=each.id, job_id=job, owner=owners[job], nbytes=each.nbytes))
    with database.write() as session:
        StoredRepository(session).replace(node_of(settings.home), found)


def _prefix_of(job: str) -> str:
    """Returns what the names of a job's models tell of its id."""
    return job[: len("ftjob-") + 12]


def _is_in(each: str, ids: frozenset[str] | None) -> bool:
    return ids is None or each in ids


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _of_folder(tally: Tally, kind: Kind, folder: Path, ids: frozenset[str] | None) -> Iterator[DiskUsage]:
    for path in _entries(folder):
        if _is_in(path.name, ids):
            yield DiskUsage(kind=kind, id=path.name, nbytes=tally.nbytes(path))


def _of_models(tally: Tally, folder: Path, jobs: frozenset[str] | None) -> Iterator[DiskUsage]:
    prefixes = None if jobs is None else frozenset(map(_prefix_of, jobs))
    # Models before checkpoints, which may have become them.
    for path in sorted(_entries(folder), key=lambda path: (_STEP in path.name, path.name)):
        prefix = job_id_prefix(path.name) if is_fine_tuned_id(path.name) else None
        if prefixes is None or prefix in prefixes:
            kind = Kind.CHECKPOINT if _STEP in path.name else Kind.MODEL
            yield DiskUsage(kind=kind, id=path.name, nbytes=tally.nbytes(path))


def _of_base_models(tally: Tally, folder: Path) -> Iterator[DiskUsage]:
    for path in _entries(folder):
        models = [path] if not path.is_dir() or (path / "config.json").exists() else _entries(path)
        for model in models:
            name = str(model.relative_to(folder))
            yield DiskUsage(kind=Kind.BASE_MODEL, id=name, nbytes=tally.nbytes(model))
