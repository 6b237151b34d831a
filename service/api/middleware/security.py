"""Checks of a request's origin, and security headers for browsers.

A foreign web page can make a browser send requests to this service from inside its network. Such requests name a
foreign Host (a rebound DNS name) or a foreign Origin, and are refused.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.service.http import drain, error_response
from windlass.service.installation import address_of, is_loopback, is_unspecified, same_address
from windlass.service.validation import ApiError

_SECURITY_HEADERS = {
    # Charts set inline styles; scripts come from this service only.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With "no-referrer", browsers would not name the origin of our own forms either.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_STAY_SECURE = "max-age=31536000"


class SecurityHeadersMiddleware:
    """Adds headers that restrict a browser to displaying the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_SECURITY_HEADERS)
                if scope.get("scheme") == "https":  # from this service or from a trusted proxy
                    headers["Strict-Transport-Security"] = _STAY_SECURE
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


class SameOriginMiddleware:
    """Refuses requests that were not meant for this service, with 403.

    The Host must be a loopback name, one of `names`, or the address that the service is bound to. If the service is
    bound to all addresses, any address is allowed, because a rebound name is never an address. Any port is allowed,
    because a forwarded port may differ. Browsers send an Origin with requests that a page makes. It must be the same
    Host.
    """

    def __init__(self, app: ASGIApp, host: str, names: Sequence[str] = ()) -> None:
        self._app = app
        self._host = host.lower()
        self._is_bound_to_all = is_unspecified(host)
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Headers(scope=scope), scope.get("scheme", "http"))):
            await error_response(ApiError(refusal, status=403, code="origin_not_allowed"))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, scheme: str) -> str | None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_ours(hosts[0].lower()):
            ours = ", ".join((self._host, *sorted(self._names)))
            return (
                f"requests must name this service as their Host ({ours}), got {', '.join(hosts)!r:.100}; other names "
                "under which it is reached go into the setting host_names"
            )
        host = hosts[0].lower()
        # Without our own TLS, a proxy in front of the service may add it.
        schemes = ("https",) if scheme == "https" else ("http", "https")
        if any(origin.lower() not in [f"{each}://{host}" for each in schemes] for origin in origins):
            return f"a page of another origin ({', '.join(origins)!r:.100}) may not use this service"
        return None

    def _is_ours(self, authority: str) -> bool:
        try:
            parts = urlsplit(f"//{authority}")
            well_formed = parts.netloc == authority and "@" not in authority and parts.port != 0
        except ValueError:
            return False
        name = parts.hostname
        if not well_formed or not name:
            return False
        return (
            is_loopback(name)
            or name in self._names
            or same_address(name, self._host)
            or (self._is_bound_to_all and address_of(name) is not None)
        )


class NullCharacterMiddleware:
    """Refuses paths and queries with null characters, with 400, because PostgreSQL cannot store them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and ("\0" in scope["path"] or b"%00" in scope["query_string"]):
            await drain(receive)  # a client cut off while it sends would not see the answer
            error = ApiError("a URL must have no null characters", code="invalid_value")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)
