"""The files that a box needs to run a job, each with its digest."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from windlass.service.installation import Settings, about
from windlass.service.jobs import STAGES_FILE
from windlass.service.machine.fleet import ContentFile, ContentPending, Where, place_of, root_of
from windlass.service.preparation import CHECK_MODEL, PLAN_JOB, PREPARE_DATA, QUESTION_FILE
from windlass.service.validation import model_dir
from windlass.storage.files import FileHashes
from windlass.storage.sql import Job

_LOG = logging.getLogger(__name__)

# The parts of a job's folder that its dispatcher and its runners read.
_RESULTS = tuple(f"{name}.json" for name in (CHECK_MODEL, PREPARE_DATA, PLAN_JOB))
_PREPARED_FILES = ("layout.json", STAGES_FILE, *(f"prepare/{name}" for name in (*_RESULTS, QUESTION_FILE)))
_PREPARED_FOLDERS = ("dataset", "plans")
# Files beside a model's safetensors that no job reads.
_UNREAD_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".gguf", ".partial")
_WEIGHTS_SUFFIX = ".safetensors"
# Seconds that a request waits for the digests of a job's files before it is answered that they are not ready.
_WAIT_S = 3.0


def job_files(settings: Settings, job: Job) -> Iterator[tuple[Where, Path]]:
    """Yields the files that a box needs to run a prepared job: those of the job's folder, then those of its model."""
    folder = root_of(settings, job.id, Where.JOB)
    for name in _PREPARED_FILES:
        if (folder / name).is_file():
            yield Where.JOB, folder / name
    for name in _PREPARED_FOLDERS:
        yield from ((Where.JOB, path) for path in _files_below(folder / name))
    source = model_dir(job.model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)
    where = Where.FINE_TUNED if source.parent == settings.fine_tuned_dir else Where.MODEL
    needs_weights = job.windlass.get("initialization") != "random"
    for path in _files_below(source):
        if path.suffix not in _UNREAD_SUFFIXES and (needs_weights or path.suffix != _WEIGHTS_SUFFIX):
            yield where, path


def _files_below(folder: Path) -> Iterator[Path]:
    """Yields the files of a folder and its subfolders in the order of their names, hidden ones left out."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files_below(path)
        elif path.is_file():
            yield path


@dataclass(slots=True)
class _Reading:
    """The digests of a job's files while a thread computes them."""

    total_nbytes: int
    done_nbytes: int = 0
    result: "Future[tuple[ContentFile, ...]]" = field(default_factory=Future)


class Manifests:
    """The files of jobs that boxes may fetch. A thread computes digests, so that large models delay no request."""

    def __init__(self, settings: Settings, *, wait_s: float = _WAIT_S) -> None:
        self._settings = settings
        self._wait_s = wait_s
        self._hashes = FileHashes(settings.home / "digests")
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="digests")
        self._lock = threading.Lock()
        self._readings: dict[str, _Reading] = {}
        self._known: dict[str, Mapping[str, ContentFile]] = {}  # files by digest, by job

    def close(self) -> None:
        """Ends the computing after the current file."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def of(self, job: Job) -> tuple[ContentFile, ...] | ContentPending:
        """Returns a job's files with their digests, or tells that they are still being read. Raises OSError."""
        with self._lock:
            reading = self._readings.get(job.id)
            if reading is None:
                files = list(job_files(self._settings, job))
                reading = _Reading(total_nbytes=sum(path.stat().st_size for _, path in files))
                self._readings[job.id] = reading
                self._executor.submit(self._read, job.id, reading, files)
        try:
            files_found = reading.result.result(timeout=self._wait_s)
        except TimeoutError:
            return ContentPending(done_nbytes=reading.done_nbytes, total_nbytes=reading.total_nbytes)
        finally:
            if reading.result.done():
                with self._lock:
                    self._readings.pop(job.id, None)
        with self._lock:
            self._known[job.id] = {file.sha256: file for file in files_found}
        return files_found

    def find(self, jobs: Callable[[], Sequence[Job]], digest: str) -> Path | None:
        """Returns the path of a file that one of these jobs needs, by its digest; None if there is none.

        None also if the file has changed since its digest was computed.
        """
        for job in jobs():
            with self._lock:
                known = self._known.get(job.id)
            if known is None:  # this process is younger than the box's manifest
                try:
                    self.of(job)
                except OSError as error:  # of this job alone; others may need the same content
                    _LOG.warning("its files cannot be read: %s", error, extra=about(job.id))
                    continue
                with self._lock:
                    known = self._known.get(job.id, {})
            if (file := known.get(digest)) is not None and (path := self._unchanged(job, file)) is not None:
                return path
        return None

    def forget(self, job_id: str) -> None:
        """Forgets the files of a job that no box has any more."""
        with self._lock:
            self._known.pop(job_id, None)

    def _unchanged(self, job: Job, file: ContentFile) -> Path | None:
        path = place_of(self._settings, job.id, file)
        try:
            root = root_of(self._settings, job.id, file.where)
            return path if self._hashes.of(_cached_root(root, path), path) == file.sha256 else None
        except OSError:
            return None

    def _read(self, job_id: str, reading: _Reading, files: list[tuple[Where, Path]]) -> None:
        def count(nbytes: int) -> None:
            reading.done_nbytes += nbytes

        try:
            found = []
            for where, path in files:
                root = root_of(self._settings, job_id, where)
                digest = self._hashes.of(_cached_root(root, path), path, count)
                relative, nbytes = str(path.relative_to(root)), path.stat().st_size
                found.append(ContentFile(path=relative, where=where, nbytes=nbytes, sha256=digest))
        except BaseException as error:  # noqa: BLE001  # the waiting request raises it
            reading.result.set_exception(error)
        else:
            reading.result.set_result(tuple(found))


def _cached_root(root: Path, path: Path) -> Path:
    """Returns the folder under which a file's digest is cached: its topmost folder below `root`."""
    parts = path.relative_to(root).parts
    return root / parts[0] if len(parts) > 1 else root
