"""The box's calls of its head: HTTPS, answered or failed within a time."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

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
_REMOVED_CODE = "box_removed"
# The head answers soon, or sends some bytes. Moving a model into place may take longer, because it is synced.
TIMEOUT = httpx.Timeout(15.0, connect=5.0)
_LONG = httpx.Timeout(600.0, connect=5.0)


class LinkError(Exception):
    """The head did not answer, or could not do it now. The same call may succeed later."""


class RefusedError(LinkError):
    """The head refused a call. `code`: that of its error."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message, code)
        self.message, self.code = message, code

    def __str__(self) -> str:
        return self.message


class RemovedError(Exception):
    """The head has removed this box."""


class HeadLink:
    """Calls one head. Several threads may use it.

    `client`: its base URL is the head's, and it shows the box's certificate.
    """

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def sync(self, request: SyncRequest) -> SyncReply:
        """Tells the head the news, and returns its instructions. Raises LinkError and RemovedError."""
        answer = self._call("POST", "/sync", content=request.model_dump_json(), headers=_JSON)
        return _read(SyncReply, answer)

    def job(self, job_id: str) -> JobContent | ContentPending:
        """Returns a job's row and the list of its files, or tells that the head is still reading them."""
        answer = self._call("GET", f"/jobs/{job_id}")
        if answer.status_code == HTTPStatus.ACCEPTED:
            return _read(ContentPending, answer)
        return _read(JobContent, answer)

    def content(self, digest: str, offset: int) -> Iterator[bytes]:
        """Yields a content from an offset on."""
        with (
            _errors(),
            self._client.stream("GET", f"{_PREFIX}/content/{digest}", headers={"Range": f"bytes={offset}-"}) as answer,
        ):
            if answer.is_error:
                answer.read()
            _check(answer)
            yield from answer.iter_raw(1024**2)

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
        with _errors():
            answer = self._client.request(method, f"{_PREFIX}{url}", **arguments)
        _check(answer)
        return answer


_JSON = {"Content-Type": "application/json"}


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise LinkError(f"the head does not answer: {str(error) or type(error).__name__}") from error


def _check(answer: httpx.Response) -> None:
    if not answer.is_error:
        return
    try:
        error = answer.json()["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, LookupError, TypeError):
        message, code = f"the head answered with status {answer.status_code}", None
    if code == _REMOVED_CODE:
        raise RemovedError(message)
    if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise LinkError(message)
    raise RefusedError(message, code)


def _read(kind: type[_Message], answer: httpx.Response) -> _Message:
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError as error:
        raise LinkError(f"the head answered in words that this version does not know: {error}") from None


def _result_url(job_id: str, file: ContentFile) -> str:
    return f"/jobs/{job_id}/results/{file.where.value}/{quote(file.path)}"


def _facts(file: ContentFile) -> dict[str, str]:
    return {"sha256": file.sha256, "nbytes": str(file.nbytes)}
