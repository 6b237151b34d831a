"""Secrets that must be had back, encrypted with a key that lies in a file of the home, outside the database."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

_KEY_FILE = "secrets.key"


class SealError(RuntimeError):
    """A secret cannot be had back: the key file is another one, or gone."""


class Seal:
    """Of one home. Where several services share a database, each needs the same key file."""

    def __init__(self, home: Path) -> None:
        """Makes the key file if there is none, readable by its owner only. Raises SealError where it holds no key."""
        self._path = home / _KEY_FILE
        try:
            self._fernet = Fernet(_key(self._path))
        except ValueError:
            raise SealError(f"{self._path} holds no key; put the right file back") from None

    def close(self, secret: str) -> str:
        """As it may be stored."""
        return self._fernet.encrypt(secret.encode()).decode()

    def open(self, sealed: str) -> str:
        """As it was. Raises SealError."""
        try:
            return self._fernet.decrypt(sealed.encode()).decode()
        except InvalidToken:
            raise SealError(
                f"{self._path} is not the key with which this secret was stored; put the file back"
            ) from None


def _key(path: Path) -> bytes:
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-") as file:  # its owner's only
            file.write(Fernet.generate_key())
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process has just made it: that one counts
                os.link(file.name, path)
    return path.read_bytes()
