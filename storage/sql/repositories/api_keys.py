"""API keys, and browser logins with them. Only digests are stored, so the database's rows cannot be used to log in."""

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
_USE_INTERVAL_S = 60.0  # minimum time between two updates of a key's last use


class Role(StrEnum):
    """The rights of a key."""

    ADMIN = "admin"  # reads and changes all users' jobs and files
    USER = "user"  # reads and changes only the key's user's jobs and files


def digest_of(secret: str) -> str:
    """Returns the stored digest of a secret. It needs no salt or slow hash, because the secret has 256 random bits."""
    return sha256(secret.encode(errors="surrogateescape")).hexdigest()


def is_active(key: ApiKey, now_s: float) -> bool:
    """Checks that a key is neither revoked nor expired."""
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
        """Creates a key. Returns it with its secret, which is not stored and cannot be read later."""
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
        """Returns the key with this id. Raises NotFound if there is none."""
        key = self._session.get(ApiKey, key_id)
        if key is None:
            raise NotFound("API key", key_id)
        return key

    def all(self) -> Sequence[ApiKey]:
        """Lists all keys, also revoked and expired ones, oldest first."""
        return self._session.scalars(select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)).all()

    def active_of(self, user: str) -> Sequence[ApiKey]:
        """Lists the active keys of a user."""
        keys = self._session.scalars(select(ApiKey).where(ApiKey.user == user, ApiKey.revoked_at.is_(None))).all()
        return [key for key in keys if is_active(key, time.time())]

    def set_limits(self, key_id: str, limits: dict[str, Any]) -> ApiKey:
        """Replaces a key's own limits. Raises NotFound if there is no such key."""
        key = self.get(key_id)
        key.limits = limits or None
        self._session.flush()
        return key

    def revoke(self, key_id: str) -> ApiKey:
        """Revokes a key and ends its logins. Idempotent. Raises NotFound if there is no such key."""
        key = self.get(key_id)
        key.revoked_at = key.revoked_at or time.time()
        self._session.execute(delete(LoginSession).where(LoginSession.key_id == key_id))
        self._session.flush()
        return key

    def find(self, secret: str) -> ApiKey | None:
        """Returns the active key with this secret, None if there is none.

        The look-up is by digest, so its duration reveals nothing about existing secrets.
        """
        key = self._session.scalar(select(ApiKey).where(ApiKey.digest == digest_of(secret)))
        return key if key is not None and is_active(key, time.time()) else None

    def has_active(self) -> bool:
        """Checks whether there is an active key."""
        unexpired = or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > time.time())
        return bool(self._session.scalar(select(exists().where(and_(ApiKey.revoked_at.is_(None), unexpired)))))

    def is_needed(self) -> bool:
        """Checks whether requests need a key: there is one that is not revoked. Expired keys count too."""
        return bool(self._session.scalar(select(exists().where(ApiKey.revoked_at.is_(None)))))

    def revision(self) -> tuple[int, int]:
        """Returns a value that changes when a key or a login is made or ended. Expiry does not change it."""
        num_keys = select(func.count()).where(ApiKey.revoked_at.is_(None)).scalar_subquery()
        num_logins = select(func.count()).select_from(LoginSession).scalar_subquery()
        counts = self._session.execute(select(num_keys, num_logins)).one()
        return counts[0], counts[1]

    def note_use(self, key_id: str, now_s: float) -> None:
        """Records the time of a key's use, unless the last record is less than a minute old."""
        before = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at <= now_s - _USE_INTERVAL_S)
        self._session.execute(update(ApiKey).where(ApiKey.id == key_id, before).values(last_used_at=now_s))

    def log_in(self, key_id: str, *, lasts_s: float) -> str:
        """Creates a login and returns its token for the browser's cookie. Deletes expired logins."""
        now_s = time.time()
        self._session.execute(delete(LoginSession).where(LoginSession.expires_at <= now_s))
        token = secrets.token_urlsafe(_SECRET_NBYTES)
        self._session.add(
            LoginSession(digest=digest_of(token), key_id=key_id, created_at=now_s, expires_at=now_s + lasts_s)
        )
        self._session.flush()
        return token

    def find_login(self, token: str) -> ApiKey | None:
        """Returns the active key of a login, None if the key or the login has ended."""
        now_s = time.time()
        query = select(ApiKey).join(LoginSession, LoginSession.key_id == ApiKey.id)
        key = self._session.scalar(
            query.where(LoginSession.digest == digest_of(token), LoginSession.expires_at > now_s)
        )
        return key if key is not None and is_active(key, now_s) else None

    def is_open(self, key_id: str, login: str | None) -> bool:
        """Checks whether a key is active, and also the login with this digest if one is given."""
        key = self._session.get(ApiKey, key_id)
        now_s = time.time()
        if key is None or not is_active(key, now_s):
            return False
        if login is None:
            return True
        row = self._session.get(LoginSession, login)
        return row is not None and row.expires_at > now_s

    def log_out(self, token: str) -> None:
        """Ends a login if it exists."""
        self._session.execute(delete(LoginSession).where(LoginSession.digest == digest_of(token)))


def needs_note(key: ApiKey, now_s: float) -> bool:
    """Checks whether `note_use` would write, so that the caller opens a writing transaction only then."""
    return key.last_used_at is None or key.last_used_at <= now_s - _USE_INTERVAL_S
