"""Sends results of jobs to the head: models, checkpoints, plans, timelines and result files.

An upload goes on where an earlier one ended. The head moves files into place when all of a folder have arrived. A file
in the home records what has arrived, so that it is sent once.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from windlass.service.cluster.box.connection import HeadRefused, HeadUnreachable
from windlass.service.cluster.box.fetch import Progress
from windlass.service.cluster.box.head_link import HeadLink
from windlass.service.installation import Settings
from windlass.service.machine.fleet import ContentFile, ResultFolder, Where, root_of
from windlass.storage.cancellation import CancelToken
from windlass.storage.files import FileChangedError, FileHashes, write_durably

# Bytes of one request. A cut costs at most what is on the way.
_PART_NBYTES = 64 * 1024**2
_BLOCK_NBYTES = 1024**2
# Tries of a part before the upload is given up for now.
_MAX_TRIES = 5
# The version of what the head does not have any more.
_LOST = "lost"
_AGAIN = frozenset(("wrong_offset", "wrong_digest", "busy", "missing_content"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A folder below a job's folder. `is_whole`: the head removes the files that are not in it any more."""

    name: str
    pattern: str
    is_whole: bool


_PARTS = (
    _Part(name="plans", pattern="plans/[0-9]*.json", is_whole=False),
    _Part(name="timeline", pattern="timeline/step-*.json", is_whole=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Sends the results of this box's jobs."""

    settings: Settings
    link: HeadLink
    # Of the records of what has arrived, which the agent's thread changes, too. Without it, changes would be lost.
    _changing: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    # --- what has arrived ---------------------------------------------------------------------------------------------

    def has_sent(self, job_id: str, name: str, version: str = "") -> bool:
        """Returns whether this version of a folder or file of a job has arrived at the head."""
        return self._sent(job_id).get(name) == version

    def has_sent_parts(self, job_id: str) -> bool:
        """Returns whether the job's plans and timelines have arrived as they are now."""
        return all(self._sent(job_id).get(part.name) == state for part, _, state in self._parts(job_id))

    def forget_sent(self, job_id: str, name: str) -> None:
        """Notes that the head does not have a folder or file any more, so that it is sent again."""
        self._note(job_id, name, _LOST)

    def has_sent_before(self, job_id: str, name: str) -> bool:
        """Returns whether any version of a folder or file of a job has arrived at the head, even if it was lost."""
        return name in self._sent(job_id)

    def forget_job(self, job_id: str) -> None:
        """Forgets what was sent of a job that was discarded."""
        with self._changing:
            self._record(job_id).unlink(missing_ok=True)

    def _sent(self, job_id: str) -> dict[str, str]:
        try:
            found = json.loads(self._record(job_id).read_text())
        except (OSError, ValueError):
            return {}  # it is sent again, which costs a look
        return found if isinstance(found, dict) else {}

    def _note(self, job_id: str, name: str, version: str) -> None:
        path = self._record(job_id)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with self._changing:
            write_durably(path, json.dumps({**self._sent(job_id), name: version}))

    def _record(self, job_id: str) -> Path:
        return self.settings.home / "sent" / f"{job_id}.json"

    # --- sending ------------------------------------------------------------------------------------------------------

    def send_model(
        self,
        job_id: str,
        name: str,
        *,
        version: str = "",
        cancel: CancelToken,
        on_begin: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """Sends the folder of a model or checkpoint. Raises as `_send`, and FileNotFoundError if there is none."""
        root = self.settings.fine_tuned_dir
        if not (root / name).is_dir():
            raise FileNotFoundError(f"there is no model in {root / name}")
        paths = sorted(path for path in (root / name).rglob("*") if path.is_file())
        self._send(job_id, Where.FINE_TUNED, name, paths, cancel, on_begin)
        self._note(job_id, name, version)

    def send_file(self, job_id: str, file_id: str, *, cancel: CancelToken) -> None:
        """Sends a result file. Raises as `_send`."""
        self._send(job_id, Where.FILE, None, [self.settings.files_dir / file_id], cancel)
        self._note(job_id, file_id, "")

    def send_parts(self, job_id: str, *, cancel: CancelToken) -> None:
        """Sends the job's plans and its last timelines, as far as they have changed. Raises as `_send`."""
        for part, paths, state in self._parts(job_id):
            if self._sent(job_id).get(part.name) != state:
                self._send(job_id, Where.JOB, part.name if part.is_whole else None, paths, cancel)
                self._note(job_id, part.name, state)

    def _parts(self, job_id: str) -> Iterator[tuple["_Part", Sequence[Path], str]]:
        """Yields the parts of a job's folder that the head shows, with their files and these files' state."""
        root = root_of(self.settings, job_id, Where.JOB)
        for part in _PARTS:
            paths = [path for path in sorted(root.glob(part.pattern)) if path.is_file()]
            if paths:
                yield part, paths, _state_of(paths)

    def _send(
        self,
        job_id: str,
        where: Where,
        folder: str | None,
        paths: Sequence[Path],
        cancel: CancelToken,
        on_begin: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """Sends files that belong together, and makes the head move them into place.

        Raises OSError if one cannot be read or has changed, HeadUnreachable if the head does not answer or refuses, and
        InterruptedError if `cancel` was set. What has arrived stays.
        """
        root = root_of(self.settings, job_id, where)
        progress = Progress(total_nbytes=sum(path.stat().st_size for path in paths))
        on_begin(progress)
        hashes = FileHashes(self.settings.home / "digests")
        files, states = [], []
        for path in paths:
            cancel.check()
            states.append(_identity(path))
            digest = hashes.of(_folder_of(root, path), path)
            nbytes = states[-1][0]
            files.append(ContentFile(path=str(path.relative_to(root)), where=where, nbytes=nbytes, sha256=digest))
        for num_try in range(_MAX_TRIES):
            for file, path, state in zip(files, paths, states, strict=True):
                body = _Body(path=path, state=state, cancel=cancel)
                try:
                    self._upload(job_id, file, body, progress, is_known=num_try == 0)
                except FileChangedError:
                    hashes.forget(_folder_of(root, path))  # a write may have left its size and time as they were
                    raise
            try:
                self.link.complete(job_id, ResultFolder(where=where, folder=folder, files=tuple(files)))
            except HeadRefused as refusal:
                if refusal.code not in _AGAIN:
                    raise
                progress.done_nbytes = 0
            else:
                return
        raise HeadUnreachable(f"the head still lacks files of {folder or where.value} after {_MAX_TRIES} uploads")

    def _upload(self, job_id: str, file: ContentFile, body: "_Body", progress: Progress, *, is_known: bool) -> None:
        """Sends what the head lacks of a file. Raises FileChangedError if it is not as its digest says.

        `is_known`: a file whose bytes are all there needs no call. Otherwise one makes the head check them.
        """
        here, num_tries = self.link.offset(job_id, file), 0
        progress.add(here, moved=False)
        is_done = is_known and 0 < file.nbytes <= here
        while not is_done:
            before = here
            try:
                here = self.link.put(job_id, file, here, body.part(here))
                is_done = here >= file.nbytes
            except HeadRefused as refusal:
                if refusal.code == "wrong_digest":
                    raise FileChangedError(f"{body.path} changed while it was sent; try again") from refusal
                if refusal.code not in _AGAIN or num_tries + 1 >= _MAX_TRIES:
                    raise
                here = self.link.offset(job_id, file)
            progress.add(here - before)
            num_tries = 0 if here > before else num_tries + 1
            if num_tries >= _MAX_TRIES and not is_done:
                raise HeadUnreachable(f"{_MAX_TRIES} uploads of {file.path} brought no byte to the head")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """The bytes of a file that has a digest. `state`: that of the file with this digest."""

    path: Path
    state: tuple[int, int, int]
    cancel: CancelToken

    def part(self, offset: int) -> Iterator[bytes]:
        """Returns the bytes of one request. Raises FileChangedError if the file was written since."""
        self.cancel.check()
        if _identity(self.path) != self.state:
            raise FileChangedError(f"{self.path} changed while it was sent; try again")
        return self._blocks(offset)

    def _blocks(self, offset: int) -> Iterator[bytes]:
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            left = _PART_NBYTES
            while left > 0 and (block := file.read(min(_BLOCK_NBYTES, left))):
                self.cancel.check()
                left -= len(block)
                yield block


def _folder_of(root: Path, path: Path) -> Path:
    """Returns the folder whose digests are kept together."""
    relative = path.relative_to(root)
    return root / relative.parts[0] if len(relative.parts) > 1 else root


def _identity(path: Path) -> tuple[int, int, int]:
    """Returns a file's size, time and inode, which change when it is written."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _state_of(paths: Sequence[Path]) -> str:
    """Returns text that changes with the files' names, sizes and times."""
    facts = []
    for path in paths:
        with suppress(OSError):
            stat = path.stat()
            facts.append((path.name, stat.st_size, stat.st_mtime_ns))
    return json.dumps(facts)
