"""Records what a job has reported and produced, and compares it with an undisturbed job."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from windlass.actors.job import OUTCOME, read_journal
from windlass.service.installation import Settings
from windlass.service.validation import fine_tuned_model_id
from windlass.storage.sql import Database, Job, JobEvent, JobStatus
from windlass.storage.sql.repositories import EventRepository, FileRepository, JobRepository

_MOST_EVENTS, _MOST_FILES = 100_000, 10_000  # more than any job here has
# Fields that must be equal for all jobs of a kind.
_SAME = ("train_losses", "valid_losses", "result_file", "checkpoints", "models")
_BEGUN = "Fine-tuning job started"  # the event of a first attempt
# Replaces the job's own part in the names of models.
_JOB = "JOB"


class Wrong(StrEnum):
    """A kind of error of a job."""

    END = "wrong_ends"  # it did not succeed
    LOSSES = "loss_mismatches"  # its losses are not those of an undisturbed job
    LOST = "lost"  # the service does not know it, or lacks a step of it
    DOUBLED = "doubled"  # it ran on two boxes, or began twice, or reported a step twice
    HANG = "hangs"  # it did not end
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """Something that is wrong with a job."""

    wrong: Wrong
    text: str
    job: int = 1  # of the run

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The results of a job that has ended. The first five fields leave out all that differs between equal jobs."""

    train_losses: tuple[tuple[int, float], ...]  # step and loss of the events, in their order
    valid_losses: tuple[tuple[int, float], ...]  # without repetitions by later attempts
    result_file: str  # the table of steps
    checkpoints: tuple[str, ...]
    models: tuple[tuple[str, str], ...]  # each file of weights, with its digest
    job: Job
    num_begins: int  # first attempts
    faults: tuple[str, ...]  # errors that need no comparison

    @property
    def digest(self) -> str:
        """A digest that is equal for jobs with equal results."""
        return hashlib.sha256(repr([getattr(self, name) for name in _SAME]).encode()).hexdigest()

    @property
    def num_attempts(self) -> int:
        """The number of launches of the job."""
        return self.job.attempt


def read_record(database: Database, settings: Settings, job_id: str) -> Record:
    """Reads the results of a job. Without a journal another box has trained it, and its events are checked alone."""
    with database.read() as session:
        job = JobRepository(session).get(job_id)
        events = EventRepository(session).since(0, limit=_MOST_EVENTS, job_id=job_id)
        checkpoints = EventRepository(session).checkpoints(job_id, limit=100, after=None).rows
        files = FileRepository(session).page(limit=_MOST_FILES, after=None, newest_first=True, purpose=None).rows
    train = [(event.data["step"], event.data["train_loss"]) for event in events if "train_loss" in event.data]
    valid = {(event.data["step"], event.data["valid_loss"]) for event in events if "valid_loss" in event.data}
    names = [row.model for row in checkpoints]
    folders = [settings.fine_tuned_dir / name for name in (*names, job.fine_tuned_model or "") if name]
    record = Record(
        train_losses=tuple(train),
        valid_losses=tuple(sorted(valid)),
        result_file="".join((settings.files_dir / name).read_text() for name in job.result_files or ()),
        checkpoints=tuple(sorted(_without_job(name, job_id) for name in names)),
        models=tuple(sorted(_digests(folders, job_id))),
        job=job,
        num_begins=sum(event.message == _BEGUN for event in events),
        faults=(),
    )
    file_ids = {row.id for row in files}
    stray = sorted(path.name for path in settings.files_dir.iterdir() if path.name not in file_ids)
    faults = [
        *_faults_of_events(events, settings.jobs_dir / job_id),
        *(f"the file {name} has no owner in the database" for name in stray),
    ]
    return replace(record, faults=tuple(faults))


def complaints(record: Record, undisturbed: Record, *, job: int = 1) -> list[Complaint]:
    """Returns the differences from the undisturbed job and all errors; empty if the job ended right.

    `job`: the job's number in its run.
    """
    return [Complaint(wrong=wrong, text=text, job=job) for wrong, text in _wrongs(record, undisturbed)]


def _wrongs(record: Record, undisturbed: Record) -> Iterator[tuple[Wrong, str]]:
    if record.job.status is not JobStatus.SUCCEEDED:
        yield Wrong.END, f"the job is {record.job.status}: {json.dumps(record.job.error)}"
        yield from ((Wrong.OTHER, fault) for fault in record.faults)
        return
    yield from ((Wrong.OTHER, fault) for fault in record.faults)
    if record.num_begins != 1:
        yield Wrong.DOUBLED if record.num_begins else Wrong.LOST, f"the job began {record.num_begins} times"
    times = Counter(step for step, _ in record.train_losses)
    yield from ((Wrong.DOUBLED, f"step {step} was reported {num} times") for step, num in times.items() if num != 1)
    for step in sorted({step for step, _ in undisturbed.train_losses} - times.keys()):
        yield Wrong.LOST, f"step {step} was not reported"
    steps = [step for step, _ in record.train_losses]
    if steps != sorted(steps):
        yield Wrong.OTHER, f"the steps were not reported in their order: {steps}"
    for name in _SAME:
        if getattr(record, name) != getattr(undisturbed, name):
            difference = _first_difference(record, undisturbed, name)
            wrong = Wrong.LOSSES if name.endswith("_losses") else Wrong.OTHER
            yield wrong, f"{name} are not those of the undisturbed job{difference}"


def _first_difference(record: Record, undisturbed: Record, name: str) -> str:
    mine, theirs = getattr(record, name), getattr(undisturbed, name)
    if isinstance(mine, str):
        mine, theirs = mine.splitlines(), theirs.splitlines()
    for left, right in zip(mine, theirs, strict=False):
        if left != right:
            return f": {left} instead of {right}"
    return f": {len(mine)} instead of {len(theirs)}"


def _faults_of_events(events: Sequence[JobEvent], job_dir: Path) -> list[str]:
    """Checks that each record of the journal is one event, exactly once, in the same order."""
    problems = []
    ordinals = [event.ordinal for event in events]
    if ordinals != sorted(set(ordinals)):
        problems.append("events have the same ids, or are not in the order of their ids")
    kept = [(event.attempt, event.seq) for event in events if event.seq is not None]
    if not (job_dir / "journal.jsonl").exists():
        problems += [f"the journal's record {each} is {num} events" for each, num in Counter(kept).items() if num > 1]
        return [*problems, *(["the events are not in the order of the journal"] if kept != sorted(kept) else [])]
    reported = [(each.attempt, each.seq) for each in read_journal(job_dir / "journal.jsonl") if each.kind != OUTCOME]
    if reported != kept:
        missing, doubled = sorted(set(reported) - set(kept)), [each for each, num in Counter(kept).items() if num > 1]
        problems.append(
            f"of the journal's records {missing} are no events, {doubled} are several, or their order differs"
        )
    return problems


def _digests(folders: Sequence[Path], job_id: str) -> list[tuple[str, str]]:
    return [
        (_without_job(f"{folder.name}/{path.name}", job_id), hashlib.sha256(path.read_bytes()).hexdigest())
        for folder in folders
        for path in folder.glob("*.safetensors")
    ]


def _without_job(name: str, job_id: str) -> str:
    """Replaces the job's own part in the name of a model."""
    return name.replace(fine_tuned_model_id("", None, job_id).rpartition(":")[2], _JOB)
