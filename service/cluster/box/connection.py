"""A box's connection to its head: HTTPS with a certificate of its own, pinned to the head's authority."""

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from windlass.service.cluster.authority import HEAD_SERVER_NAME
from windlass.service.installation import BOX_FILE
from windlass.service.validation import ReportedError
from windlass.storage.files import write_durably

# The head answers soon, or sends some bytes.
TIMEOUT = httpx.Timeout(15.0, connect=5.0)
_FOLDER = "box"  # of the key and the certificates, in the home


class HeadUnreachable(ReportedError):
    """The head does not answer now. The same call may succeed later."""


class HeadRefused(ReportedError):
    """The head refused a call. `code`: that of its error; `status`: of HTTP."""

    def __init__(self, message: str, code: str | None, status: int) -> None:
        super().__init__(message, code, status)
        self.message, self.code, self.status = message, code, status

    def __str__(self) -> str:
        return self.message


class BoxRemoved(HeadRefused):
    """The head has removed this box."""


class VersionDiffers(HeadRefused):
    """The versions of windlass, torch or Ray are not the head's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The head that a home belongs to, and the names that it has there. Stored in `box.json`."""

    head: str  # URL of the head's cluster port
    box_id: str
    name: str


@dataclass(frozen=True, slots=True)
class BoxFiles:
    """The files of a box's right to call its head, in its home."""

    home: Path

    @property
    def key(self) -> Path:
        """The box's private key, which never leaves it."""
        return self.home / _FOLDER / "key.pem"

    @property
    def certificate(self) -> Path:
        """The certificate that the head has signed."""
        return self.home / _FOLDER / "certificate.pem"

    @property
    def authority(self) -> Path:
        """The certificate of the head's authority."""
        return self.home / _FOLDER / "authority.pem"


def membership_of(home: Path) -> Membership | None:
    """Returns the head of a home that has joined one, or None. Raises ReportedError for a file of another kind."""
    path = home / BOX_FILE
    try:
        return Membership(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ReportedError(f"{path} cannot be read ({error}); remove it, and join again") from None


def keep_membership(home: Path, membership: Membership) -> None:
    """Stores that a home belongs to a head."""
    write_durably(home / BOX_FILE, json.dumps(asdict(membership), indent=1))


class HeadConnection:
    """Calls a head. Several threads may use it.

    Each method raises HeadUnreachable, BoxRemoved, VersionDiffers or HeadRefused. `client`: its base URL is the head's.
    """

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._local_host: str | None = None

    @classmethod
    def to(cls, url: str, context: ssl.SSLContext) -> Self:
        """Opens a connection to a head's cluster port."""
        return cls(make_client(url, context))

    @classmethod
    def of_box(cls, home: Path) -> Self:
        """Opens the connection of a box that has joined. Raises ReportedError."""
        membership = membership_of(home)
        if membership is None:
            raise ReportedError(f"{home} has joined no head; `windlass node join` does it")
        return cls.to(membership.head, context_of_box(home))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def client(self) -> httpx.Client:
        """The client of HTTP, whose base URL is the head's."""
        return self._client

    @property
    def local_host(self) -> str | None:
        """The address of this box from which the last request went; None: none has gone yet."""
        return self._local_host

    def close(self) -> None:
        """Closes all connections."""
        self._client.close()

    def get(self, path: str, **more: Any) -> httpx.Response:
        """Reads an answer as a whole."""
        return self.request("GET", path, **more)

    def post(self, path: str, message: Any = None, **more: Any) -> httpx.Response:
        """Sends a message as JSON."""
        return self.request("POST", path, json=message, **more)

    @contextmanager
    def stream(self, path: str, **more: Any) -> Iterator[httpx.Response]:
        """Yields an answer whose body the caller reads in parts."""
        with told_errors(self._client), self._client.stream("GET", path, **more) as answer:
            if answer.is_error:
                answer.read()
            raise_refusal(answer)
            yield answer

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Sends a request, and reads the answer as a whole."""
        with told_errors(self._client):
            answer = self._client.request(method, path, **more)
        self._local_host = _local_host_of(answer) or self._local_host
        raise_refusal(answer)
        return answer


def _local_host_of(answer: httpx.Response) -> str | None:
    stream = answer.extensions.get("network_stream")
    try:
        return None if stream is None else str(stream.get_extra_info("client_addr")[0])
    except OSError:  # the connection has ended since
        return None


class _HeadTransport(httpx.HTTPTransport):
    """Expects the head's name in the server's certificate, whatever address it is called by."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions = {**request.extensions, "sni_hostname": HEAD_SERVER_NAME}
        return super().handle_request(request)


def make_client(url: str, context: ssl.SSLContext) -> httpx.Client:
    """Makes a client of a head's cluster port. Proxies of the environment are not used."""
    transport = _HeadTransport(verify=context, trust_env=False)
    return httpx.Client(base_url=url, timeout=TIMEOUT, transport=transport, trust_env=False)


def context_of_box(home: Path) -> ssl.SSLContext:
    """Returns the TLS context of a box that has joined. Raises ReportedError if its files are damaged."""
    files = BoxFiles(home)
    try:
        context = context_for(files.authority.read_text())
        context.load_cert_chain(files.certificate, files.key)
    except (OSError, ValueError) as error:
        folder = files.key.parent
        raise ReportedError(
            f"the certificate or key in {folder} cannot be used ({error}); leave with `windlass node leave --forget`, "
            "then join again with a new code"
        ) from error
    return context


def context_for(authority: str) -> ssl.SSLContext:
    """Returns a TLS context that trusts one authority only. `authority`: its certificate as PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority)
    return context


@contextmanager
def told_errors(client: httpx.Client) -> Iterator[None]:
    """Raises HeadUnreachable for errors of the connection."""
    try:
        yield
    except httpx.HTTPError as error:
        raise HeadUnreachable(_why_unreachable(str(client.base_url), error)) from error


def _why_unreachable(url: str, error: httpx.HTTPError) -> str:
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"{url} is not the head that this box knows: its certificate is of another authority ({text})"
    if "alert" in text.lower():
        return f"the head at {url} does not accept this box's certificate ({text}); join again with a new code"
    if isinstance(error, httpx.TimeoutException):
        return f"the head at {url} did not answer in time"
    return f"the head at {url} does not answer: {text}"


def raise_refusal(answer: httpx.Response) -> None:
    """Raises the error that the head answered with, if it did."""
    if not answer.is_error:
        return
    try:
        error = answer.json()["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, LookupError, TypeError):
        message, code = f"the head answered with status {answer.status_code}", None
    if code == "box_removed":
        raise BoxRemoved(message, code, answer.status_code)
    if code == "version_differs":
        raise VersionDiffers(message, code, answer.status_code)
    if answer.status_code >= 500:
        raise HeadUnreachable(message)
    raise HeadRefused(message, code, answer.status_code)
