"""Fetches the files of jobs from the head: each content once, checked, and linked into its places."""

import hashlib
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from windlass.amounts import bytes_text
from windlass.engine.checkpoint import copy_file
from windlass.service.cluster.box.connection import HeadUnreachable
from windlass.service.cluster.box.head_link import HeadLink
from windlass.service.installation import LEAST_FREE_NBYTES, Settings, needs_room
from windlass.service.machine.fleet import ContentFile, Where, place_of, root_of
from windlass.storage.cancellation import CancelToken
from windlass.storage.files import FileHashes, hash_file, sync_path, write_atomically

# Files that are fetched at once. A single connection does not fill a fast link, because it waits for the disk.
_NUM_CONNECTIONS = 2
_BLOCK_NBYTES = 1024**2
# Attempts to fetch a file whose digest was wrong.
_MAX_WRONG = 2
# Seconds over which the rate is measured.
_RATE_WINDOW_S = 5.0


class NoRoomHereError(Exception):
    """The disk of this box's home has no room for a job's files. The message is a waiting reason."""


class WrongContentError(Exception):
    """A file arrived with a wrong digest, again and again."""


@dataclass(slots=True)
class Progress:
    """The bytes of a transfer. Several threads may add to it."""

    total_nbytes: int
    done_nbytes: int = 0
    _seen: "deque[tuple[float, int]]" = field(default_factory=deque)
    _moved_nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nbytes: int, *, moved: bool = True) -> None:
        """Counts bytes that are here. `moved`: they came over the network now."""
        with self._lock:
            self.done_nbytes += nbytes
            self._moved_nbytes += nbytes if moved else 0
            now_s = time.monotonic()
            self._seen.append((now_s, self._moved_nbytes))
            while len(self._seen) > 2 and self._seen[0][0] < now_s - _RATE_WINDOW_S:
                self._seen.popleft()

    @property
    def bytes_per_s(self) -> float:
        """The rate over the last seconds."""
        with self._lock:
            if len(self._seen) < 2:
                return 0.0
            (first_s, first), (_, last) = self._seen[0], self._seen[-1]
            return (last - first) / max(time.monotonic() - first_s, 1e-3)


class Blobs:
    """The contents that this box has fetched, by digest, with the places that they are linked to."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._root = settings.home / "blobs"
        self._hashes = FileHashes(settings.home / "digests")

    def path(self, digest: str) -> Path:
        """Returns the path of a content, whether it is here or not."""
        return self._root / digest

    # --- fetching -----------------------------------------------------------------------------------------------------

    def fetch(
        self,
        link: HeadLink,
        job_id: str,
        files: Sequence[ContentFile],
        *,
        cancel: CancelToken,
        in_use: Collection[str] = (),
        on_begin: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """Brings the files of a job into place. What is here already is not fetched again.

        `in_use`: digests that other jobs need, which are not removed to make room. `on_begin` gets the progress, which
        other threads may read from then on.

        Raises:
            NoRoomHereError: the home's disk is too small.
            WrongContentError: a file had a wrong digest each time.
            HeadUnreachable: the head did not answer, or refused. What has arrived stays.
            InterruptedError: `cancel` was set.
        """
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        progress = Progress(total_nbytes=sum(file.nbytes for file in files))
        on_begin(progress)
        missing: dict[str, list[ContentFile]] = {}
        for file in files:
            cancel.check()
            if self._is_in_place(job_id, file):
                progress.add(file.nbytes, moved=False)
            else:
                missing.setdefault(file.sha256, []).append(file)
        needed = [group[0] for group in missing.values() if not self.path(group[0].sha256).exists()]
        self._make_room(needed, {*in_use, *(file.sha256 for file in files)})
        # Small files first, so that the connections then share the large ones.
        groups = sorted(missing.values(), key=lambda group: group[0].nbytes)
        has_failed = threading.Event()

        def check() -> None:
            cancel.check()
            if has_failed.is_set():
                raise InterruptedError("another file of the job could not be fetched")

        with ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="fetch") as executor:
            tasks = [executor.submit(self._bring, link, job_id, group, check, progress) for group in groups]
            try:
                for task in as_completed(tasks):
                    task.result()
            except BaseException:
                has_failed.set()
                executor.shutdown(wait=False, cancel_futures=True)
                raise
        self._sync_folders(place_of(self._settings, job_id, file) for file in files)

    def _sync_folders(self, places: Iterable[Path]) -> None:
        """Syncs the folders above files, because new ones are durable once their own parents are synced."""
        roots = {self._settings.home, self._settings.models_dir}
        folders: set[Path] = set()
        for place in places:
            folder = place.parent
            while folder not in folders and folder.is_dir():
                folders.add(folder)
                if folder in roots:
                    break
                folder = folder.parent
        for folder in folders:
            sync_path(folder)

    def _is_in_place(self, job_id: str, file: ContentFile) -> bool:
        root, place = root_of(self._settings, job_id, file.where), place_of(self._settings, job_id, file)
        with suppress(OSError):
            if place.stat().st_size != file.nbytes:
                return False
            with suppress(OSError):
                if place.samefile(self.path(file.sha256)):
                    return True
            return self._hashes.of(root / Path(file.path).parts[0] if "/" in file.path else root, place) == file.sha256
        return False

    def _bring(
        self, link: HeadLink, job_id: str, group: Sequence[ContentFile], check: Callable[[], None], progress: Progress
    ) -> None:
        """Fetches a content and links it into its places."""
        first = group[0]
        if not self.path(first.sha256).exists():
            self._fetch_content(link, first, check, progress)
        else:
            progress.add(first.nbytes, moved=False)
        for file in group:
            self._place(job_id, file)
        progress.add(sum(file.nbytes for file in group[1:]), moved=False)

    def _fetch_content(self, link: HeadLink, file: ContentFile, check: Callable[[], None], progress: Progress) -> None:
        partial = self.path(f"{file.sha256}.partial")
        for _ in range(_MAX_WRONG):
            counted = self._fetch_once(link, file, partial, check, progress)
            if counted is None:
                return
            partial.unlink()
            progress.add(-counted)
        raise WrongContentError(
            f"{file.path} arrived {_MAX_WRONG} times with another SHA-256 than {file.sha256}; check the memory of both "
            "boxes and the network between them"
        )

    def _fetch_once(
        self, link: HeadLink, file: ContentFile, partial: Path, check: Callable[[], None], progress: Progress
    ) -> int | None:
        """Fetches the rest of a content. Returns None if its digest is right, else the bytes that were counted."""
        digest, here = hashlib.sha256(), 0
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "r+b", buffering=0) as out:
            while block := out.read(_BLOCK_NBYTES):  # the part that an earlier call has fetched
                digest.update(block)
                here += len(block)
            progress.add(here, moved=False)
            if here > file.nbytes:
                return here
            if here < file.nbytes:
                for block in link.content(file.sha256, here):
                    check()
                    _write_all(out.fileno(), block)
                    digest.update(block)
                    here += len(block)
                    progress.add(len(block))
                    if here > file.nbytes:
                        return here
            if here < file.nbytes:
                raise HeadUnreachable(f"the head ended {file.path} after {here} of {bytes_text(file.nbytes)}")
            if digest.hexdigest() != file.sha256:
                return here
            os.fsync(out.fileno())
        partial.rename(self.path(file.sha256))
        sync_path(self._root)
        return None

    # --- places -------------------------------------------------------------------------------------------------------

    def _place(self, job_id: str, file: ContentFile) -> None:
        """Links a content into its place, or copies it to another file system, where it then stays alone."""
        blob, place = self.path(file.sha256), place_of(self._settings, job_id, file)
        self._note(file.sha256, place)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.partial")
        partial.unlink(missing_ok=True)
        try:
            partial.hardlink_to(blob)
        except OSError:  # another file system, or one without hard links
            copy_file(blob, partial)
            sync_path(partial)
        partial.replace(place)
        sync_path(place.parent)

    def _note(self, digest: str, place: Path) -> None:
        """Records a place before it is made, so that it can be removed with the content."""
        path = self.path(f"{digest}.places")
        known = _lines(path)
        if str(place) not in known:
            write_atomically(path, "".join(f"{line}\n" for line in (*known, place)))
        else:
            path.touch()

    def forget_job(self, files: Iterable[ContentFile], in_use: Collection[str]) -> None:
        """Removes the contents that only the folder of a removed job had. Models stay for the next job."""
        for file in files:
            with suppress(OSError):
                is_unused = file.where is Where.JOB and file.sha256 not in in_use
                if is_unused and self.path(file.sha256).stat().st_nlink == 1:
                    self.remove(file.sha256)

    # --- room ---------------------------------------------------------------------------------------------------------

    def _make_room(self, needed: Iterable[ContentFile], in_use: Collection[str]) -> None:
        """Removes contents that no job needs, the longest unused first, until there is room.

        Raises NoRoomHereError.
        """
        needed_nbytes = LEAST_FREE_NBYTES
        for file in needed:
            with suppress(OSError):
                needed_nbytes -= self.path(f"{file.sha256}.partial").stat().st_size
            needed_nbytes += file.nbytes
        unused = sorted(self._digests() - set(in_use), key=self._last_use)
        while (free_nbytes := shutil.disk_usage(self._settings.home).free) < needed_nbytes:
            if not unused:
                raise NoRoomHereError(needs_room(self._settings.home, needed_nbytes, free_nbytes))
            self.remove(unused.pop(0))

    def _digests(self) -> set[str]:
        return {path.name.partition(".")[0] for path in self._root.iterdir()} if self._root.is_dir() else set()

    def _last_use(self, digest: str) -> float:
        for path in (self.path(f"{digest}.places"), self.path(digest), self.path(f"{digest}.partial")):
            with suppress(OSError):
                return path.stat().st_mtime
        return 0.0

    def remove(self, digest: str) -> None:
        """Removes a content from all its places."""
        places = self.path(f"{digest}.places")
        for line in _lines(places):
            with suppress(OSError):
                if hash_file(Path(line)) == digest:
                    Path(line).unlink()
                    _remove_empty_folders(Path(line).parent, (self._settings.models_dir, self._settings.fine_tuned_dir))
        for path in (self.path(digest), self.path(f"{digest}.partial"), places):
            path.unlink(missing_ok=True)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _remove_empty_folders(folder: Path, roots: Collection[Path]) -> None:
    while folder not in roots and any(folder.is_relative_to(root) for root in roots):
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def _write_all(fd: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(fd, view) :]
