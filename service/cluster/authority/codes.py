"""Codes with which boxes join: a secret for the head, and the fingerprint by which a box knows the head."""

import base64
import hashlib
import secrets
from dataclasses import dataclass
from typing import Self

from sqlalchemy.orm import Session

from windlass.service.cluster.authority.authority import Authority
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


def new_join_code(settings: Settings, session: Session) -> str:
    """Makes and stores a code with which one box may join, and returns it."""
    code = JoinCode(secrets.token_bytes(_SECRET_NBYTES), Authority.of(settings.home).fingerprint)
    BoxRepository(session).add_code(code.digest, lasts_s=CODE_LASTS_S)
    return code.text
