"""The transfers of a box, each kind in a thread of its own: files of taken jobs, and results of jobs.

Nothing here is needed after a restart: what has arrived lies in the home.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from windlass.amounts import GIB, bytes_text
from windlass.service.cluster.box.connection import BoxRemoved, HeadRefused, HeadUnreachable
from windlass.service.cluster.box.fetch import Blobs, NoRoomHereError, Progress, WrongContentError
from windlass.service.cluster.box.head_link import HeadLink
from windlass.service.cluster.box.send import Sender
from windlass.service.installation import Settings, about
from windlass.service.machine.fleet import ContentPending, JobContent, taken_dir, taken_file
from windlass.storage.cancellation import CancelToken
from windlass.storage.files import write_atomically
from windlass.storage.sql import TERMINAL_STATUSES
from windlass.storage.sql.repositories import JobReport

_LOG = logging.getLogger(__name__)

# Seconds between looks for whether the head has read a job's files.
_PENDING_S = 0.5
# Seconds before a failed transfer is tried again.
_RETRY_S = 5.0
# Seconds between uploads of a running job's plans and timelines.
_PARTS_INTERVAL_S = 10.0
_EXPECTED = (HeadUnreachable, HeadRefused, NoRoomHereError, WrongContentError, OSError)


@dataclass(slots=True)
class _Transfer:
    """A transfer of one job's files."""

    cancel: CancelToken = field(default_factory=CancelToken)
    text: str = ""  # its state, or why it does not go on, while it has no progress
    progress: Progress | None = None
    task: "Future[Any] | None" = None
    retry_at: float = 0.0  # by the monotonic clock

    def show(self, progress: Progress) -> None:
        """Shows the progress of a part."""
        self.progress = progress

    def has_ended(self) -> bool:
        """Returns whether the transfer was cancelled and its thread has ended, so that it never goes on."""
        return self.cancel.is_cancelled and (self.task is None or self.task.done())


class Takings:
    """Fetches the files of taken jobs, one job after the other."""

    def __init__(self, settings: Settings, link: HeadLink, box_name: Callable[[], str]) -> None:
        self._settings = settings
        self._link = link
        self._box_name = box_name
        self._blobs = Blobs(settings)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="take")
        self._transfers: dict[str, _Transfer] = {}
        taken_dir(settings.home).mkdir(mode=0o700, exist_ok=True)

    def take(self, job_id: str, *, has_begun: bool = False) -> dict[str, Any] | None:
        """Goes on with fetching a job's files. Returns its row once all are here. Raises BoxRemoved.

        `has_begun`: also of a job that has begun elsewhere, whose states come later. Else only its row is fetched.
        """
        transfer = _transfer_of(self._transfers, job_id, "its files are to be copied")
        if transfer.task is None:
            if time.monotonic() >= transfer.retry_at:
                transfer.task = self._executor.submit(self._fetch, job_id, transfer, has_begun)
            return None
        if not transfer.task.done():
            return None
        task, transfer.task = transfer.task, None
        transfer.retry_at = time.monotonic() + _RETRY_S
        try:
            row: dict[str, Any] = task.result()
        except BoxRemoved:
            raise
        except _EXPECTED as error:
            transfer.text = str(error) if isinstance(error, NoRoomHereError) else f"its files are copied again: {error}"
            _LOG.warning("its files could not be fetched: %s", error, extra=about(job_id))
            return None
        return row

    def texts(self) -> dict[str, str]:
        """Returns how far each job's files are copied, in words for users."""
        return {job_id: self._text(transfer) for job_id, transfer in list(self._transfers.items())}

    def _text(self, transfer: _Transfer) -> str:
        if (progress := transfer.progress) is None or not progress.total_nbytes:
            return transfer.text
        return f"{amount_text(progress)} copied to box {self._box_name()}, {rate_text(progress)}"

    def end(self, job_id: str) -> bool:
        """Ends the fetching of a job. Returns False if its thread has not ended yet."""
        transfer = self._transfers.get(job_id)
        if transfer is None:
            return True
        transfer.cancel.cancel()
        if transfer.task is not None and not transfer.task.cancel() and not transfer.task.done():
            return False
        del self._transfers[job_id]
        return True

    def job_ids(self) -> Collection[str]:
        """Returns the jobs whose files are being fetched."""
        return list(self._transfers)

    def taken(self) -> set[str]:
        """Returns the jobs that this box has begun to take and has not discarded."""
        return taken_jobs(self._settings)

    def row(self, job_id: str) -> dict[str, Any] | None:
        """Returns the row of a taken job as the head told it, None if this box has not begun to take it."""
        content = taken_content(self._settings, job_id)
        return None if content is None else content.row

    def forget(self, job_id: str) -> None:
        """Forgets a job whose folder is removed, and the contents that only it had."""
        forget_taken(self._settings, job_id)

    def close(self) -> None:
        """Ends all transfers. What has arrived stays."""
        for transfer in self._transfers.values():
            transfer.cancel.cancel()
        self._executor.shutdown(cancel_futures=True)

    def _fetch(self, job_id: str, transfer: _Transfer, has_begun: bool) -> dict[str, Any]:
        while isinstance(content := self._link.job(job_id), ContentPending):
            percent = 100 * content.done_nbytes // max(content.total_nbytes, 1)
            transfer.text = f"its files are being read on the head: {percent} %"
            transfer.cancel.check()
            time.sleep(_PENDING_S)
        if content.row["attempt"] != 0 and not has_begun:  # its states are elsewhere, or lost
            return content.row
        write_atomically(taken_file(self._settings.home, job_id), content.model_dump_json())
        in_use = _in_use(self._settings, but=job_id)
        try:
            self._blobs.fetch(
                self._link, job_id, content.files, cancel=transfer.cancel, in_use=in_use, on_begin=transfer.show
            )
        finally:
            transfer.progress = None
        return content.row


def taken_jobs(settings: Settings) -> set[str]:
    """Returns the jobs that this box has begun to take and has not discarded."""
    return {path.stem for path in taken_dir(settings.home).glob("*.json")}


def taken_content(settings: Settings, job_id: str) -> JobContent | None:
    """Returns the row and the files of a taken job as the head told them, None if it has not begun to be taken."""
    try:
        return JobContent.model_validate_json(taken_file(settings.home, job_id).read_text())
    except (OSError, ValidationError):
        return None


def forget_taken(settings: Settings, job_id: str) -> None:
    """Forgets a job whose folder is removed, and the contents that only it had."""
    if (content := taken_content(settings, job_id)) is not None:
        Blobs(settings).forget_job(content.files, _in_use(settings, but=job_id))
    taken_file(settings.home, job_id).unlink(missing_ok=True)


def _in_use(settings: Settings, *, but: str) -> set[str]:
    contents = (taken_content(settings, job_id) for job_id in taken_jobs(settings) if job_id != but)
    return {file.sha256 for content in contents if content is not None for file in content.files}


class Sendings:
    """Sends the results of jobs, one job after the other."""

    def __init__(self, settings: Settings, link: HeadLink, box_name: Callable[[], str]) -> None:
        self._settings = settings
        self._box_name = box_name
        self._sender = Sender(settings=settings, link=link)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="send")
        self._transfers: dict[str, _Transfer] = {}
        self._parts_at: dict[str, float] = {}

    def go_on(self, job: JobReport) -> None:
        """Sends what is new of a job, in the background. Raises BoxRemoved.

        `job`: a report of all that the box has.
        """
        transfer = _transfer_of(self._transfers, job.id, "")
        if transfer.task is not None:
            if not transfer.task.done():
                return
            task, transfer.task, transfer.progress, transfer.text = transfer.task, None, None, ""
            try:
                task.result()
            except BoxRemoved:
                raise
            except _EXPECTED as error:
                transfer.retry_at = time.monotonic() + _RETRY_S
                transfer.text = f"{error}; it is tried again"
                _LOG.warning("its results could not be sent: %s", error, extra=about(job.id))
        if time.monotonic() >= transfer.retry_at and self._has_news(job):
            transfer.task = self._executor.submit(self._send, job, transfer)

    def sent_checkpoints(self, job: JobReport) -> Sequence[Any] | None:
        """Returns the checkpoints of a report whose files have arrived at the head.

        None while one is sent again: the head keeps the earlier version until then. If its row went first, the head
        would remove the folder of the new version, which may arrive at the same time.
        """
        if any(self._sender.has_sent_before(job.id, each.model) for each in self._unsent_checkpoints(job)):
            return None
        return [each for each in job.checkpoints or () if self._sender.has_sent(job.id, each.model, _version(each))]

    def is_complete(self, job: JobReport) -> bool:
        """Returns whether all results of a finished job have arrived, so that its end may be told."""
        model = _model_beside_checkpoints(job)
        names = [*([] if model is None else [model]), *job.fields["result_files"]]
        return (
            all(self._sender.has_sent(job.id, name) for name in names)
            and not self._unsent_checkpoints(job)
            and self._sender.has_sent_parts(job.id)
        )

    def text(self, job_id: str) -> str:
        """Returns how far the results of a job are sent, in words for users."""
        transfer = self._transfers.get(job_id)
        how_far = "" if transfer is None else transfer.text
        if transfer is not None and (progress := transfer.progress) is not None:
            percent = 100 * progress.done_nbytes // max(progress.total_nbytes, 1)
            how_far = f"{percent} % of {progress.total_nbytes / GIB:.1f} GiB, {rate_text(progress)}"
        return f"its results are being copied from box {self._box_name()}" + (f": {how_far}" if how_far else "")

    def is_sending(self) -> bool:
        """Returns whether results are being sent now."""
        return any(each.task is not None and not each.task.done() for each in self._transfers.values())

    def send_again(self, job_id: str, names: Collection[str]) -> None:
        """Sends results again that the head does not have any more."""
        for name in names:
            self._sender.forget_sent(job_id, name)

    def end(self, job_id: str) -> bool:
        """Ends the sending of a job that is discarded. Returns False if its thread has not ended yet."""
        transfer = self._transfers.get(job_id)
        if transfer is not None:
            transfer.cancel.cancel()
            if transfer.task is not None and not transfer.task.cancel() and not transfer.task.done():
                return False
            del self._transfers[job_id]
        self._parts_at.pop(job_id, None)
        return True

    def forget(self, job_id: str) -> None:
        """Forgets what was sent of a job that is removed."""
        self._sender.forget_job(job_id)

    def close(self) -> None:
        """Ends all transfers. What has arrived stays."""
        for transfer in self._transfers.values():
            transfer.cancel.cancel()
        self._executor.shutdown(cancel_futures=True)

    def _has_news(self, job: JobReport) -> bool:
        if _is_over(job):
            return not self.is_complete(job)
        if self._unsent_checkpoints(job):
            return True
        is_due = time.monotonic() >= self._parts_at.get(job.id, 0.0)
        return is_due and not self._sender.has_sent_parts(job.id)

    def _unsent_checkpoints(self, job: JobReport) -> Sequence[Any]:
        """Returns the checkpoints that are to be sent. The job may have removed the folder of one just now."""
        return [
            each
            for each in job.checkpoints or ()
            if not self._sender.has_sent(job.id, each.model, _version(each))
            and (self._settings.fine_tuned_dir / each.model).is_dir()
        ]

    def _send(self, job: JobReport, transfer: _Transfer) -> None:
        for each in self._unsent_checkpoints(job):
            with suppress(FileNotFoundError):  # the job has removed it, or replaces it
                self._sender.send_model(
                    job.id, each.model, version=_version(each), cancel=transfer.cancel, on_begin=transfer.show
                )
        if _is_over(job):
            model = _model_beside_checkpoints(job)
            if model is not None and not self._sender.has_sent(job.id, model):
                self._sender.send_model(job.id, model, cancel=transfer.cancel, on_begin=transfer.show)
            for file_id in job.fields["result_files"]:
                if not self._sender.has_sent(job.id, file_id):
                    self._sender.send_file(job.id, file_id, cancel=transfer.cancel)
        with suppress(FileNotFoundError):  # an old timeline was removed; the next try sends what is there then
            self._sender.send_parts(job.id, cancel=transfer.cancel)
        self._parts_at[job.id] = time.monotonic() + _PARTS_INTERVAL_S


def _transfer_of(transfers: dict[str, _Transfer], job_id: str, text: str) -> _Transfer:
    """Returns a job's transfer. It is a new one if the job was taken back and is given again. `text`: of a new one."""
    transfer = transfers.get(job_id)
    if transfer is None or transfer.has_ended():
        transfer = transfers[job_id] = _Transfer(text=text)
    return transfer


def amount_text(progress: Progress) -> str:
    """Formats the bytes of a transfer: "3.1 of 14.2 GiB". Small ones have other units."""
    if progress.total_nbytes < GIB:
        done, total = bytes_text(progress.done_nbytes), bytes_text(progress.total_nbytes)
        return f"{done} of {total}"
    return f"{progress.done_nbytes / GIB:.1f} of {progress.total_nbytes / GIB:.1f} GiB"


def rate_text(progress: Progress) -> str:
    """Formats the rate of a transfer: "112 MB/s"."""
    return f"{progress.bytes_per_s / 1e6:.0f} MB/s"


def _model_beside_checkpoints(job: JobReport) -> str | None:
    """Returns the final model, or None if there is none or if the last checkpoint is the same folder."""
    model: str | None = job.fields["fine_tuned_model"]
    return None if model in {each.model for each in job.checkpoints or ()} else model


def _is_over(job: JobReport) -> bool:
    return job.fields["status"] in {status.value for status in TERMINAL_STATUSES}


def _version(checkpoint: Any) -> str:
    return f"{checkpoint.attempt}/{checkpoint.created_at}"
