"""Codes with which boxes join: a secret for the head, and the fingerprint by which a box knows the head."""

import base64
import hashlib
import secrets
from dataclasses import dataclass
from importlib.metadata import version
from typing import Self

from sqlalchemy.orm import Session

from windlass.service.cluster.authority.authority import Authority
from windlass.service.cluster.authority.wheel import digest_of_wheel, ensure_wheel
from windlass.service.installation import Settings
from windlass.service.validation import ReportedError
from windlass.storage.sql.repositories import BoxRepository

CODE_LASTS_S = 15 * 60.0
_PREFIX = "wj_"
_SECRET_NBYTES = _FINGERPRINT_NBYTES = 32


class CodeError(ReportedError):
    """A text is no join code."""


@dataclass(frozen=True, slots=True)
class JoinCode:
    """A join code in its parts."""

    secret: bytes
    fingerprint: bytes  # SHA-256 of the certificate of the head's authority

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a code. Raises CodeError."""
        body = text.strip().removeprefix(_PREFIX)
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except ValueError:
            raw = b""
        if len(raw) != _SECRET_NBYTES + _FINGERPRINT_NBYTES or not text.strip().startswith(_PREFIX):
            raise CodeError("this is no join code; copy it whole from `windlass node code`, which begins it with wj_")
        return cls(raw[:_SECRET_NBYTES], raw[_SECRET_NBYTES:])

    @property
    def text(self) -> str:
        """The code as a user types it."""
        encoded = base64.urlsafe_b64encode(self.secret + self.fingerprint).decode()
        return _PREFIX + encoded.rstrip("=")

    @property
    def digest(self) -> str:
        """The SHA-256 of the secret in hex, which the head stores."""
        return hashlib.sha256(self.secret).hexdigest()


def join_commands(settings: Settings, code: str) -> list[str]:
    """Returns the commands to type on a machine without windlass. The wheel is the head's, and is checked by its hash.

    On a machine that has windlass, the last one is enough.
    """
    host = settings.cluster_host or ""
    head = f"[{host}]:{settings.cluster_port}" if ":" in host else f"{host}:{settings.cluster_port}"
    wheel = ensure_wheel(settings.home)
    torch = ".".join(version("torch").partition("+")[0].split(".")[:2])
    packages = f"./{wheel.name} 'torch=={torch}.*' ray=={version('ray')}"
    return [
        # TLS is not checked here, because this machine does not know the head yet: the hash is. One command, so that
        # nothing is installed after a wrong hash if all lines are pasted at once.
        f"curl --insecure --silent --show-error --output {wheel.name} https://{head}/v1/node/wheel "
        f"&& echo '{digest_of_wheel(wheel)}  {wheel.name}' | sha256sum --check "
        f"&& python3 -m venv ~/windlass-venv && ~/windlass-venv/bin/pip install {packages}",
        f"~/windlass-venv/bin/windlass node join --head {head} --code {code} --ssd /path/on/an/ssd",
    ]


def new_join_code(settings: Settings, session: Session) -> str:
    """Makes and stores a code with which one box may join, and returns it."""
    code = JoinCode(secrets.token_bytes(_SECRET_NBYTES), Authority.of(settings.home).fingerprint)
    BoxRepository(session).add_code(code.digest, lasts_s=CODE_LASTS_S)
    return code.text
