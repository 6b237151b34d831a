"""The box's calls of its head: HTTPS, answered or failed within a time."""

import time
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from windlass.service.cluster.box.connection import HeadConnection, HeadUnreachable
from windlass.service.machine.fleet import (
    ContentFile,
    ContentPending,
    JobContent,
    ResultFolder,
    SyncReply,
    SyncRequest,
)

_Message = TypeVar("_Message", bound=BaseModel)

_PREFIX = "/v1/node"
_OFFSET_HEADER = "Upload-Offset"
# Seconds of a measurement of the link, and the bytes that are timed together.
_SPEED_S = 1.0
_SPEED_BLOCK_NBYTES = 64 * 1024
# Moving a model into place may take long, because it is synced.
_LONG = httpx.Timeout(600.0, connect=5.0)


class HeadLink:
    """The calls about jobs. Several threads may use it.

    Each method raises as those of a `HeadConnection`.
    """

    def __init__(self, connection: HeadConnection) -> None:
        self._connection = connection

    def sync(self, request: SyncRequest) -> SyncReply:
        """Tells the head the news, and returns its instructions."""
        answer = self._call("POST", "/sync", content=request.model_dump_json(), headers=_JSON)
        return _read(SyncReply, answer)

    @property
    def local_host(self) -> str | None:
        """The address from which this box calls its head; None: not known yet."""
        return self._connection.local_host

    def sign_link(self, request: str) -> str:
        """Returns a certificate for the link of this box. `request`: as PEM."""
        return str(self._call("POST", "/link", json={"request": request}).json()["certificate"])

    def job(self, job_id: str) -> JobContent | ContentPending:
        """Returns a job's row and the list of its files, or tells that the head is still reading them."""
        answer = self._call("GET", f"/jobs/{job_id}")
        if answer.status_code == HTTPStatus.ACCEPTED:
            return _read(ContentPending, answer)
        content = _read(JobContent, answer)
        if content.row["id"] != job_id:
            raise HeadUnreachable(f"the head answered with job {content.row['id']} when asked for {job_id}")
        return content

    def content(self, digest: str, offset: int) -> Iterator[bytes]:
        """Yields a content from an offset on."""
        path, headers = f"{_PREFIX}/content/{digest}", {"Range": f"bytes={offset}-"}
        with self._connection.stream(path, headers=headers) as answer:
            yield from answer.iter_raw(1024**2)

    def measure_speed(self) -> float:
        """Returns the bytes per second that arrive from the head, as files would."""
        nbytes, start_s = 0, None
        with self._connection.stream(f"{_PREFIX}/speed") as answer:
            for block in answer.iter_raw(_SPEED_BLOCK_NBYTES):
                now_s = time.monotonic()
                if start_s is None:
                    start_s = now_s  # the first block includes the head's time to answer
                    continue
                nbytes += len(block)
                if now_s - start_s > _SPEED_S:
                    break
        if start_s is None or nbytes == 0:
            raise HeadUnreachable("the head sent too few bytes to measure the link")
        return nbytes / max(time.monotonic() - start_s, 1e-6)

    def offset(self, job_id: str, file: ContentFile) -> int:
        """Returns the bytes of an upload that the head has."""
        answer = self._call("HEAD", _result_url(job_id, file), params=_facts(file))
        return int(answer.headers[_OFFSET_HEADER])

    def put(self, job_id: str, file: ContentFile, offset: int, body: Iterable[bytes]) -> int:
        """Sends a part of a file, and returns the bytes that the head then has."""
        params = {**_facts(file), "offset": str(offset)}
        answer = self._call("PUT", _result_url(job_id, file), params=params, content=body, timeout=_LONG)
        return int(answer.json()["offset"])

    def complete(self, job_id: str, folder: ResultFolder) -> None:
        """Makes the head move files into place that it has."""
        url = f"/jobs/{job_id}/results/complete"
        self._call("POST", url, content=folder.model_dump_json(), headers=_JSON, timeout=_LONG)

    def _call(self, method: str, url: str, **arguments: Any) -> httpx.Response:
        return self._connection.request(method, f"{_PREFIX}{url}", **arguments)


_JSON = {"Content-Type": "application/json"}


def _read(kind: type[_Message], answer: httpx.Response) -> _Message:
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError as error:
        raise HeadUnreachable(f"the head answered in words that this version does not know: {error}") from None


def _result_url(job_id: str, file: ContentFile) -> str:
    return f"/jobs/{job_id}/results/{file.where.value}/{quote(file.path)}"


def _facts(file: ContentFile) -> dict[str, str]:
    return {"sha256": file.sha256, "nbytes": str(file.nbytes)}
