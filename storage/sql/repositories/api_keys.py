"""API keys and the logins made with them. Only digests are kept: nothing here can be used to get in."""

import secrets
import time
from collections.abc import Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any

from sqlalchemy import and_, delete, exists, func, or_, select, update
from sqlalchemy.orm import Session

from windlass.storage.sql import ApiKey, LoginSession, NotFound

KEY_PREFIX = "wk-"
_SECRET_NBYTES = 32
_USE_INTERVAL_S = 60.0


class Role(StrEnum):
    """What a key's holder may do."""

    ADMIN = "admin"  # sees and changes what is anybody's
    USER = "user"  # sees and changes what is their own


def digest_of(secret: str) -> str:
    """What is kept of a secret of 256 random bits; it needs no salt and no slow hash, as nobody can guess it."""
    return sha256(secret.encode(errors="surrogateescape")).hexdigest()


def is_active(key: ApiKey, now_s: float) -> bool:
    """Whether a key opens anything."""
    return key.revoked_at is None and (key.expires_at is None or now_s < key.expires_at)


class KeyRepository:
    """API keys and logins, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def create(
        self,
        *,
        name: str,
        user: str,
        role: Role,
        expires_at: float | None = None,
        limits: dict[str, Any] | None = None,
    ) -> tuple[ApiKey, str]:
        """A new key, and its secret, which nobody can look up later."""
        secret = KEY_PREFIX + secrets.token_urlsafe(_SECRET_NBYTES)
        key = ApiKey(
            id=f"key-{secrets.token_hex(8)}",
            name=name,
            user=user,
            role=role.value,
            digest=digest_of(secret),
            created_at=time.time(),
            expires_at=expires_at,
            limits=limits or None,
        )
        self._session.add(key)
        self._session.flush()
        return key, secret

    def get(self, key_id: str) -> ApiKey:
        """The key with this id; NotFound if there is none."""
        key = self._session.get(ApiKey, key_id)
        if key is None:
            raise NotFound("API key", key_id)
        return key

    def all(self) -> Sequence[ApiKey]:
        """Every key that was ever made, oldest first."""
        return self._session.scalars(select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)).all()

    def active_of(self, user: str) -> Sequence[ApiKey]:
        """The keys of a user that open."""
        keys = self._session.scalars(select(ApiKey).where(ApiKey.user == user, ApiKey.revoked_at.is_(None))).all()
        return [key for key in keys if is_active(key, time.time())]

    def set_limits(self, key_id: str, limits: dict[str, Any]) -> ApiKey:
        """Replace a key's own limits; NotFound if there is no such key."""
        key = self.get(key_id)
        key.limits = limits or None
        self._session.flush()
        return key

    def revoke(self, key_id: str) -> ApiKey:
        """End a key and its logins, at once and for good; NotFound if there is none. Again changes nothing."""
        key = self.get(key_id)
        key.revoked_at = key.revoked_at or time.time()
        self._session.execute(delete(LoginSession).where(LoginSession.key_id == key_id))
        self._session.flush()
        return key

    def find(self, secret: str) -> ApiKey | None:
        """The active key with this secret.

        It is looked up by its digest: how long that takes tells nothing of the secrets that are there.
        """
        key = self._session.scalar(select(ApiKey).where(ApiKey.digest == digest_of(secret)))
        return key if key is not None and is_active(key, time.time()) else None

    def has_active(self) -> bool:
        """Whether somebody has a key that opens."""
        unexpired = or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > time.time())
        return bool(self._session.scalar(select(exists().where(and_(ApiKey.revoked_at.is_(None), unexpired)))))

    def is_needed(self) -> bool:
        """Whether requests need a key: one was made and not revoked. That it expires opens no door."""
        return bool(self._session.scalar(select(exists().where(ApiKey.revoked_at.is_(None)))))

    def revision(self) -> tuple[int, int]:
        """Another one once a key or a login was made or ended; that one expires changes nothing."""
        num_keys = select(func.count()).where(ApiKey.revoked_at.is_(None)).scalar_subquery()
        num_logins = select(func.count()).select_from(LoginSession).scalar_subquery()
        found = self._session.execute(select(num_keys, num_logins)).one()
        return found[0], found[1]

    def note_use(self, key_id: str, now_s: float) -> None:
        """Keep when a key was used last, unless that was within the last minute."""
        before = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at <= now_s - _USE_INTERVAL_S)
        self._session.execute(update(ApiKey).where(ApiKey.id == key_id, before).values(last_used_at=now_s))

    def log_in(self, key_id: str, *, lasts_s: float) -> str:
        """A new login's token, for its browser's cookie. Logins that are over are forgotten."""
        now_s = time.time()
        self._session.execute(delete(LoginSession).where(LoginSession.expires_at <= now_s))
        token = secrets.token_urlsafe(_SECRET_NBYTES)
        self._session.add(
            LoginSession(digest=digest_of(token), key_id=key_id, created_at=now_s, expires_at=now_s + lasts_s)
        )
        self._session.flush()
        return token

    def find_login(self, token: str) -> ApiKey | None:
        """The active key that a login was made with; None once either is over."""
        now_s = time.time()
        query = select(ApiKey).join(LoginSession, LoginSession.key_id == ApiKey.id)
        key = self._session.scalar(
            query.where(LoginSession.digest == digest_of(token), LoginSession.expires_at > now_s)
        )
        return key if key is not None and is_active(key, now_s) else None

    def is_open(self, key_id: str, login: str | None) -> bool:
        """Whether a key is still active, and so is the login with this digest, if one is given."""
        key = self._session.get(ApiKey, key_id)
        now_s = time.time()
        if key is None or not is_active(key, now_s):
            return False
        if login is None:
            return True
        row = self._session.get(LoginSession, login)
        return row is not None and row.expires_at > now_s

    def log_out(self, token: str) -> None:
        """End a login, if there is one."""
        self._session.execute(delete(LoginSession).where(LoginSession.digest == digest_of(token)))


def needs_note(key: ApiKey, now_s: float) -> bool:
    """Whether `note_use` would write: only then is it worth a transaction that writes."""
    return key.last_used_at is None or key.last_used_at <= now_s - _USE_INTERVAL_S
