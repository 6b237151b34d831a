"""One webhook on its way: to an address that was checked, signed, without redirects.

Signed as the Standard Webhooks specification has it (https://www.standardwebhooks.com), which the official `openai`
client verifies.
"""

import base64
import hashlib
import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx

_SECRET_PREFIX = "whsec_"
_SECRET_NBYTES = 32
_TIMEOUT_S = 10.0
_MAX_URL_CHARS = 2000
# Prefixes of IPv6 behind which IPv4 addresses lie: NAT64, 6to4.
_NAT64, _6TO4 = ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("2002::/16")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class UrlRefusedError(ValueError):
    """Nothing is sent to this URL; the text says why."""


class DeliveryError(RuntimeError):
    """It did not arrive, or was not answered with 2xx; the text says why."""


def new_signing_secret() -> str:
    """As receivers get it."""
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_NBYTES)).decode()


def signature(secret: str, *, event_id: str, timestamp: int, body: str) -> str:
    """One of the header's entries."""
    key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
    digest = hmac.new(key, f"{event_id}.{timestamp}.{body}".encode(), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def check_url(url: str, *, allows_private: bool) -> None:
    """Raise UrlRefusedError where it is seen without asking anybody that nothing may go there."""
    if len(url) > _MAX_URL_CHARS or not url.isascii() or any(char <= " " for char in url):
        raise UrlRefusedError(f"a URL has at most {_MAX_URL_CHARS} characters, all of them of ASCII, and no spaces")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UrlRefusedError(f"not a URL: {error}") from None
    allowed = ("https", "http") if allows_private else ("https",)
    if parts.scheme not in allowed:
        raise UrlRefusedError(f"must begin with {' or '.join(f'{each}://' for each in allowed)}")
    if not parts.hostname or parts.username is not None or parts.password is not None or port == 0:
        raise UrlRefusedError("must name a host, and neither user nor password")
    try:
        address = ipaddress.ip_address(parts.hostname)
    except ValueError:
        return  # a name, which is looked up before each request
    _check_address(address, allows_private=allows_private)


def send(url: str, *, event_id: str, body: str, signing_secrets: Sequence[str], allows_private: bool) -> int:
    """Deliver an event; the status code of the answer, whatever it is.

    Raises UrlRefusedError, or DeliveryError where nothing answered.
    """
    check_url(url, allows_private=allows_private)
    parts = urlsplit(url)
    host = parts.hostname
    assert host is not None, "it was checked"
    address = _resolve(host, parts.port or (443 if parts.scheme == "https" else 80), allows_private=allows_private)
    # To the very address that was checked: a second look-up could give another one.
    target = httpx.URL(url).copy_with(host=str(address))
    timestamp = int(time.time())
    headers = {
        "Host": parts.netloc,
        "Content-Type": "application/json",
        "User-Agent": "windlass",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(
            signature(secret, event_id=event_id, timestamp=timestamp, body=body) for secret in signing_secrets
        ),
    }
    try:
        # No proxy of the environment's: it would look the name up itself.
        with (
            httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False, trust_env=False) as client,
            client.stream(
                "POST", target, content=body.encode(), headers=headers, extensions={"sni_hostname": host}
            ) as response,
        ):
            return response.status_code  # nobody reads the body, however long it is
    except httpx.HTTPError as error:
        raise DeliveryError(f"{type(error).__name__}: {error}") from error


def _resolve(host: str, port: int, *, allows_private: bool) -> Address:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DeliveryError(f"{host} was not found: {error}") from error
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    for address in addresses:
        _check_address(address, allows_private=allows_private)
    return addresses[0]


def _check_address(address: Address, *, allows_private: bool) -> None:
    for each in _behind(address):
        if each.is_multicast or each.is_unspecified or not (allows_private or each.is_global):
            raise UrlRefusedError(
                f"{address} is not a public address; the setting webhook_private_addresses allows such for all webhooks"
            )


def _behind(address: Address) -> list[Address]:
    """It, and an IPv4 address that it stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in _NAT64:
        return [address, ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    if address in _6TO4 and address.sixtofour is not None:
        return [address, address.sixtofour]
    return [address]
