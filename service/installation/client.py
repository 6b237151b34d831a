"""A client of the service's HTTP API, for the command line."""

import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from windlass.service.validation import ReportedError

_TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
_PAGE = 100
# Another program at this address may accept the connection and never answer.
_HEALTH_TIMEOUT_S = 3.0


class ServiceUnreachableError(ReportedError):
    """No service answers at the address."""


class RequestRefusedError(ReportedError):
    """The service answered with an error; `code` is that of its envelope."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message, code)
        self.message, self.code = message, code

    def __str__(self) -> str:
        return self.message


class ServiceClient:
    """Calls a running service. Its errors are one line for the user.

    With `certificate` (PEM), the client trusts exactly that certificate, under any name. `if_away`: the end of the
    error message if no service answers.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        certificate: Path | None = None,
        if_away: str = "; start it with `windlass up --detach`",
    ) -> None:
        self._base_url = base_url
        self._if_away = if_away
        self._http = httpx.Client(
            base_url=base_url,
            timeout=httpx.Timeout(30.0, connect=5.0),
            trust_env=False,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            verify=True if certificate is None else _trust_only(certificate),
        )

    def __enter__(self) -> "ServiceClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def is_healthy(self) -> bool:
        """Returns whether the service answers."""
        try:
            return self._http.get("/healthz", timeout=_HEALTH_TIMEOUT_S).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def upload(self, path: Path) -> dict[str, Any]:
        """Uploads a training or validation file."""
        with path.open("rb") as file:
            return self._call("POST", "/v1/files", files={"file": (path.name, file)}, data={"purpose": "fine-tune"})

    def files(self) -> list[dict[str, Any]]:
        """Lists all files."""
        return self._list("/v1/files")

    def file(self, file_id: str) -> dict[str, Any]:
        """Returns a file."""
        return self._call("GET", f"/v1/files/{file_id}")

    def models(self) -> list[dict[str, Any]]:
        """Lists base and fine-tuned models."""
        return list(self._call("GET", "/v1/models")["data"])

    def create_job(self, request: dict[str, Any]) -> dict[str, Any]:
        """Submits a job."""
        # Encoded here because httpx refuses to send a NaN. The service's error then names the setting with that value.
        headers = {"Content-Type": "application/json"}
        return self._call("POST", "/v1/fine_tuning/jobs", content=json.dumps(request), headers=headers)

    def jobs(self) -> list[dict[str, Any]]:
        """Lists all jobs, newest first."""
        return self._list("/v1/fine_tuning/jobs")

    def job(self, job_id: str) -> dict[str, Any]:
        """Returns a job."""
        return self._call("GET", f"/v1/fine_tuning/jobs/{job_id}")

    def checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        """Lists a job's checkpoints, latest first."""
        return self._list(f"/v1/fine_tuning/jobs/{job_id}/checkpoints")

    def boxes(self) -> list[dict[str, Any]]:
        """Lists the boxes, the head first."""
        return list(self._call("GET", "/v1/boxes")["data"])

    def box(self, name: str) -> dict[str, Any]:
        """Returns a box."""
        return self._call("GET", f"/v1/boxes/{quote(name, safe='')}")

    def change_box(self, name: str, change: str) -> dict[str, Any]:
        """Drains, resumes or removes a box."""
        return self._call("POST", f"/v1/boxes/{quote(name, safe='')}/{change}")

    def new_join_code(self) -> dict[str, Any]:
        """Makes a code with which one box may join. The answer has the commands to type there."""
        return self._call("POST", "/v1/join_codes")

    def storage(self) -> dict[str, Any]:
        """Returns the disk usage of all items, with totals."""
        return self._call("GET", "/v1/storage")

    def job_storage(self, job_id: str) -> dict[str, Any]:
        """Returns a job's disk usage by part."""
        return self._call("GET", f"/v1/fine_tuning/jobs/{job_id}/storage")

    def delete_job(self, job_id: str, *, with_model: bool) -> None:
        """Deletes a finished job."""
        self._call("DELETE", f"/v1/fine_tuning/jobs/{job_id}", params={"delete_model": with_model})

    def delete_file(self, file_id: str) -> None:
        """Deletes a file."""
        self._call("DELETE", f"/v1/files/{file_id}")

    def delete_model(self, model: str) -> None:
        """Deletes a fine-tuned model or a checkpoint."""
        self._call("DELETE", f"/v1/models/{model}")

    def webhook_event_types(self) -> list[str]:
        """Lists the event types that a webhook can receive."""
        return list(self._call("GET", "/v1/webhook_event_types")["data"])

    def webhooks(self) -> list[dict[str, Any]]:
        """Lists all webhook endpoints, newest first."""
        return self._list("/v1/webhook_endpoints")

    def webhook(self, webhook_id: str) -> dict[str, Any]:
        """Returns a webhook endpoint with its last deliveries."""
        return self._call("GET", f"/v1/webhook_endpoints/{webhook_id}")

    def create_webhook(self, *, name: str, url: str, event_types: list[str]) -> dict[str, Any]:
        """Adds a webhook endpoint. The answer contains its signing secret."""
        body = {"name": name, "url": url, "event_types": event_types}
        return self._call("POST", "/v1/webhook_endpoints", json=body)

    def test_webhook(self, webhook_id: str, event_type: str) -> dict[str, Any]:
        """Sends a sample event. The answer contains the receiver's status code."""
        return self._call("POST", f"/v1/webhook_endpoints/{webhook_id}/test", json={"event_type": event_type})

    def delete_webhook(self, webhook_id: str) -> None:
        """Deletes a webhook endpoint."""
        self._call("DELETE", f"/v1/webhook_endpoints/{webhook_id}")

    def timeline(self, job_id: str, step: int | None = None) -> dict[str, Any]:
        """Returns the trace of a step of a job; None: of the last one that is held."""
        params = {} if step is None else {"step": step}
        return self._call("GET", f"/v1/fine_tuning/jobs/{job_id}/timeline", params=params)

    def plan(self, job_id: str) -> dict[str, Any]:
        """Returns the plan of a job and its measured values."""
        return self._call("GET", f"/v1/fine_tuning/jobs/{job_id}/plan")

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancels a job, or requests its runner to stop."""
        return self._call("POST", f"/v1/fine_tuning/jobs/{job_id}/cancel")

    def pause(self, job_id: str) -> dict[str, Any]:
        """Pauses a job, or requests its runner to pause."""
        return self._call("POST", f"/v1/fine_tuning/jobs/{job_id}/pause")

    def resume(
        self, job_id: str, *, gpus: int | str | None = None, boxes: int | list[str] | None = None
    ) -> dict[str, Any]:
        """Queues a paused job again. None: as before.

        `gpus`: its number of GPUs from now on, or "auto". `boxes`: their number or names, the head among them.
        """
        changes = {name: value for name, value in (("gpus", gpus), ("boxes", boxes)) if value is not None}
        body = {"json": {"windlass": changes}} if changes else {}
        return self._call("POST", f"/v1/fine_tuning/jobs/{job_id}/resume", **body)

    def restart(self, job_id: str, *, box: str | None = None) -> dict[str, Any]:
        """Begins a new job that goes on for one that failed or whose box is lost. Returns the new job."""
        return self._call("POST", f"/v1/fine_tuning/jobs/{job_id}/restart", json={"windlass": {"box": box}})

    def events(self, job_id: str, *, after: str | None = None) -> list[dict[str, Any]]:
        """Lists a job's events, oldest first, or only those after the event `after`."""
        found: list[dict[str, Any]] = []
        # The service lists the newest first, so this pages back to the known event.
        for event in self._pages(f"/v1/fine_tuning/jobs/{job_id}/events"):
            if event["id"] == after:
                break
            found.append(event)
        return found[::-1]

    def follow(self, job_id: str, *, interval_s: float = 0.5) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Yields the job and its new events repeatedly, until the job has ended and all events were yielded."""
        last: str | None = None
        while True:
            job = self.job(job_id)
            events = self.events(job_id, after=last)
            last = events[-1]["id"] if events else last
            yield job, events
            if job["status"] in _TERMINAL:
                return
            time.sleep(interval_s)

    def _list(self, path: str) -> list[dict[str, Any]]:
        return list(self._pages(path))

    def _pages(self, path: str) -> Iterator[dict[str, Any]]:
        after: str | None = None
        while True:
            page = self._call("GET", path, params={"limit": _PAGE} | ({"after": after} if after else {}))
            yield from page["data"]
            if not page["has_more"]:
                return
            after = page["data"][-1]["id"]

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **arguments)
        except httpx.ConnectError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ServiceUnreachableError(
                    f"what answers at {self._base_url} has another certificate than the settings name: {error}"
                ) from error
            raise ServiceUnreachableError(f"no service answers at {self._base_url}{self._if_away}") from error
        except httpx.TransportError as error:
            raise ServiceUnreachableError(
                f"the service at {self._base_url} did not answer {method} {path}: {error or type(error).__name__}"
            ) from error
        if response.is_success:
            answer: dict[str, Any] = response.json()
            return answer
        raise _refusal(response)


def _trust_only(certificate: Path) -> ssl.SSLContext:
    """Makes a context that trusts only the file's first certificate, not the other certificates of its chain."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    first, end, _ = certificate.read_text().partition("-----END CERTIFICATE-----")
    context.load_verify_locations(cadata=first + end)
    return context


def _refusal(response: httpx.Response) -> RequestRefusedError:
    try:
        error = response.json()["error"]
        return RequestRefusedError(str(error["message"]), error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = f"status {response.status_code} from something that is not windlass at {response.url}"
        return RequestRefusedError(text)
