"""Codes with which boxes join."""

import hashlib
import secrets

from sqlalchemy.orm import Session

from windlass.service.installation import Settings
from windlass.storage.sql.repositories import BoxRepository

_LASTS_S = 15 * 60.0


def new_join_code(settings: Settings, session: Session) -> str:
    """Makes and stores a code with which one box may join, and returns it."""
    secret = secrets.token_urlsafe(32)
    BoxRepository(session).add_code(hashlib.sha256(secret.encode()).hexdigest(), lasts_s=_LASTS_S)
    return secret
