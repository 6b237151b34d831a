"""Hides the server's folders from answers to users.

Errors of disks and models name folders of this machine. Administrators need these names, users do not. Other callers
than administrators get replacement words in every answer, so no endpoint can forget to hide a folder.
"""

import re
import sys
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.service.installation import Settings
from windlass.storage.sql.repositories import Role

_JSON, _STREAM = "application/json", "text/event-stream"
# Excludes a longer name that begins with a folder's name.
_LONGER = rb"(?![\w-]|\.\w)"


class HiddenPaths:
    """The folders of an installation, and the words that replace them."""

    def __init__(self, settings: Settings) -> None:
        names = {str(settings.models_dir): "the models' folder", sys.prefix: "the installation"}
        names |= {str(path): f"SSD {number}" for number, path in enumerate(settings.ssd_dirs, start=1)}
        names |= {str(settings.home): "the service's home"}
        self._words: Mapping[bytes, bytes] = {name.encode(): words.encode() for name, words in names.items()}
        longest_first = sorted(self._words, key=len, reverse=True)
        self._pattern = re.compile(b"(" + b"|".join(map(re.escape, longest_first)) + b")" + _LONGER)

    def replaced(self, text: bytes) -> bytes:
        """Replaces the folders in `text`, which is UTF-8, by their words."""
        return self._pattern.sub(lambda match: self._words[match[1]], text)


class HiddenPathsMiddleware:
    """Replaces folders in JSON and event streams for callers who are not administrators.

    Contents of files stay as they are.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._paths = HiddenPaths(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get("state", {}).get("caller")
        if scope["type"] != "http" or caller is None or caller.role is Role.ADMIN:
            await self._app(scope, receive, send)
            return
        kind, start, body = "", None, bytearray()

        async def send_replaced(message: Message) -> None:
            nonlocal kind, start
            if message["type"] == "http.response.start":
                kind = Headers(scope=message).get("content-type", "").partition(";")[0]
                if kind == _JSON:
                    start = message  # sent later, because the length is known only with the whole body
                    return
            elif message["type"] == "http.response.body" and kind == _STREAM:
                message = {**message, "body": self._paths.replaced(message.get("body", b""))}
            elif message["type"] == "http.response.body" and start is not None:
                body.extend(message.get("body", b""))
                if message.get("more_body"):
                    return
                whole = self._paths.replaced(bytes(body))
                headers = MutableHeaders(scope=start)
                if "content-length" in headers and scope["method"] != "HEAD":
                    headers["content-length"] = str(len(whole))
                await send(start)
                message = {**message, "body": whole}
            await send(message)

        await self._app(scope, receive, send_replaced)
