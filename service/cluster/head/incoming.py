"""Files that boxes upload: kept aside by their digests until they are complete, and then moved into place."""

import math
import os
import shutil
import threading
import time
from collections.abc import AsyncIterable, Callable, Collection
from contextlib import suppress
from pathlib import Path

import anyio.to_thread

from windlass.amounts import bytes_text
from windlass.engine.checkpoint import copy_file, make_partial_folder, remove_model_folder
from windlass.service.installation import LEAST_FREE_NBYTES, Settings
from windlass.service.machine.fleet import ContentFile, ResultFolder, Where, is_model_of, is_result_of, root_of
from windlass.service.validation import ApiError
from windlass.storage.files import hash_file, open_lock_file, sync_path, sync_tree, try_lock
from windlass.storage.sql import Job

_FOLDER = "incoming"  # in the home


class Incoming:
    """The uploads of one head. A file is kept under its job and its digest, so that each content comes once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._root = settings.home / _FOLDER
        self._lock = threading.Lock()  # held for moments only, because reports wait for it
        # By the names of models, the time by the monotonic clock at which each was placed; infinite until it is.
        self._placed_at: dict[str, float] = {}

    # --- uploads ------------------------------------------------------------------------------------------------------

    def offset(self, job_id: str, file: ContentFile) -> int:
        """Returns the bytes of a file that are here already."""
        complete, partial = self._paths(job_id, file)
        for path in (complete, partial):
            try:
                return min(path.stat().st_size, file.nbytes)
            except FileNotFoundError:
                pass
        return 0

    async def append(self, job_id: str, file: ContentFile, offset: int, body: AsyncIterable[bytes]) -> int:
        """Appends a part of a file and returns the bytes that are here now. A part that is cut off stays.

        Raises ApiError if the part does not begin where the file ends, if the file is too long, or if its digest is
        wrong. It is then removed.
        """
        complete, partial = self._paths(job_id, file)
        if complete.exists():
            return file.nbytes
        partial.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not partial.exists():
            _remove_partials(partial.parent)  # a box sends one file of a job after the other
        fd = open_lock_file(partial)
        try:
            if not try_lock(fd) or os.fstat(fd).st_nlink == 0:  # or it was removed just now
                raise ApiError("another upload of this file is under way; try again", status=409, code="busy")
            here = os.lseek(fd, 0, os.SEEK_END)
            if here != offset:
                message = f"the file goes on at byte {here}, not at {offset}"
                raise ApiError(message, status=409, code="wrong_offset")
            self._check_room(file.nbytes - here)
            async for block in body:
                here += len(block)
                if here > file.nbytes:
                    os.ftruncate(fd, 0)
                    raise ApiError(f"the file is longer than {bytes_text(file.nbytes)}", code="too_long")
                await anyio.to_thread.run_sync(_write_all, fd, block)
            if here == file.nbytes:
                await anyio.to_thread.run_sync(self._finish, fd, partial, complete, file)
        finally:
            os.close(fd)
        return here

    def _finish(self, fd: int, partial: Path, complete: Path, file: ContentFile) -> None:
        if (found := hash_file(partial)) != file.sha256:
            partial.unlink()
            message = f"{file.path} arrived with the SHA-256 {found}, not {file.sha256}; send it again"
            raise ApiError(message, status=422, code="wrong_digest")
        os.fsync(fd)
        partial.rename(complete)
        sync_path(complete.parent)

    def _check_room(self, nbytes: int) -> None:
        free_nbytes = shutil.disk_usage(self._settings.home).free
        if nbytes + LEAST_FREE_NBYTES > free_nbytes:
            message = (
                f"the disk of the head has {bytes_text(free_nbytes)} free, and the file needs {bytes_text(nbytes)}"
            )
            raise ApiError(message, status=503, code="disk_full")

    def _paths(self, job_id: str, file: ContentFile) -> tuple[Path, Path]:
        folder = self._root / job_id
        return folder / file.sha256, folder / f"{file.sha256}.partial"

    # --- into place ---------------------------------------------------------------------------------------------------

    def place(self, job: Job, folder: ResultFolder) -> None:
        """Moves complete files into place. A model or checkpoint appears as a whole, and replaces an earlier one.

        Idempotent. Raises ApiError if a file is missing or not a result of the job. Nothing was moved then.
        """
        for file in folder.files:
            check_result(job, file.where, file.path)
            if file.where is not folder.where:
                raise ApiError("all files of a folder belong to one place", code="invalid_value", param="files")
        self._check_complete(job.id, folder.files)
        if folder.where is Where.FINE_TUNED:
            self._place_model(job, folder)
            self._forget_removed(job.id, folder.files)
            return
        for file in folder.files:
            self._place_file(job.id, file)
        if folder.folder is not None:
            self._remove_others(root_of(self._settings, job.id, folder.where), folder)
        for file in folder.files:
            self._paths(job.id, file)[0].unlink(missing_ok=True)

    def _check_complete(self, job_id: str, files: Collection[ContentFile]) -> None:
        missing = [file.path for file in files if not self._paths(job_id, file)[0].exists()]
        if missing:
            message = f"{len(missing)} files have not arrived yet, such as {missing[0]}; send them first"
            raise ApiError(message, status=409, code="missing_content")

    def _place_model(self, job: Job, folder: ResultFolder) -> None:
        name = folder.folder
        if name is None or not is_model_of(job, name):
            raise ApiError(f"{name} is no model of job {job.id}", param="folder", code="invalid_value")
        if any(not file.path.startswith(f"{name}/") for file in folder.files):
            raise ApiError(f"all files belong into {name}", param="files", code="invalid_value")
        with self._lock:
            self._placed_at[name] = math.inf
        try:
            self._replace_model(job, name, folder)
        finally:
            self._placed_at[name] = time.monotonic()

    def _replace_model(self, job: Job, name: str, folder: ResultFolder) -> None:
        target = self._settings.fine_tuned_dir / name
        if self._is_placed(job.id, target, folder.files):
            return
        partial = make_partial_folder(target)
        try:
            for file in folder.files:
                place = partial / Path(file.path).relative_to(name)
                place.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(self._paths(job.id, file)[0], place)
            sync_tree(partial)
            remove_model_folder(target)
            partial.rename(target)
            sync_path(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def remove_unused(self, model: str, *, since: float) -> None:
        """Removes the folder of a checkpoint that its job no longer has, unless it was placed since.

        `since`: by the monotonic clock, from before the report that lacks the checkpoint was read. A checkpoint that
        was saved again may arrive before the removal, and the box sends it only once.
        """
        with self._lock:
            if self._placed_at.get(model, -math.inf) >= since:
                return
            self._placed_at.pop(model, None)
            with suppress(OSError):
                remove_model_folder(self._settings.fine_tuned_dir / model)

    def _is_placed(self, job_id: str, target: Path, files: Collection[ContentFile]) -> bool:
        """Returns whether a model's folder has exactly these files, hard links of what was uploaded."""
        here = {path for path in target.rglob("*") if path.is_file()} if target.is_dir() else set()
        places = {target.parent / file.path: self._paths(job_id, file)[0] for file in files}
        return here == places.keys() and all(path.samefile(blob) for path, blob in places.items())

    def _place_file(self, job_id: str, file: ContentFile) -> None:
        target = root_of(self._settings, job_id, file.where) / file.path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        partial.unlink(missing_ok=True)
        _link_or_copy(self._paths(job_id, file)[0], partial)
        partial.replace(target)
        sync_path(target.parent)

    def _remove_others(self, root: Path, folder: ResultFolder) -> None:
        assert folder.folder is not None
        names = {file.path for file in folder.files}
        for path in (root / folder.folder).glob("*"):
            if path.is_file() and str(path.relative_to(root)) not in names:
                path.unlink(missing_ok=True)

    def _forget_removed(self, job_id: str, present: Collection[ContentFile]) -> None:
        """Removes uploads that no folder uses any more. Those of present folders stay, because the next may share them.

        They are hard links, so that they need no space. Incomplete ones are of folders that their job has removed.
        """
        _remove_partials(self._root / job_id)
        kept = {file.sha256 for file in present}
        for path in (self._root / job_id).iterdir():
            if path.suffix != ".partial" and path.name not in kept and path.stat().st_nlink == 1:
                path.unlink(missing_ok=True)

    # --- the end ------------------------------------------------------------------------------------------------------

    def forget(self, job_id: str) -> None:
        """Removes what is kept of a job that has ended or belongs to no box."""
        shutil.rmtree(self._root / job_id, ignore_errors=True)

    def forget_all_but(self, find_jobs: Callable[[], Collection[str]]) -> None:
        """Removes what is kept of other jobs. `find_jobs`: returns the ids of those that boxes may send results of."""
        folders = list(self._root.iterdir()) if self._root.is_dir() else []
        job_ids = find_jobs()  # later, so that no folder belongs to a job that was given to a box in between
        for folder in folders:
            if folder.name not in job_ids:
                shutil.rmtree(folder, ignore_errors=True)


def check_result(job: Job, where: Where, path: str) -> None:
    """Raises ApiError unless a box may send this file of a job."""
    if not is_result_of(job, where, path):
        raise ApiError(f"{where.value}/{path} is no result of job {job.id}", param="path", code="invalid_value")


def _remove_partials(folder: Path) -> None:
    """Removes the incomplete uploads of a folder that no request is writing."""
    for path in folder.glob("*.partial"):
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if try_lock(fd):
                    path.unlink(missing_ok=True)
            finally:
                os.close(fd)


def _write_all(fd: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(fd, view) :]


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # another file system, or one without hard links
        copy_file(source, target)
        sync_path(target)
