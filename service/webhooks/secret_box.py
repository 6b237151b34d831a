"""Encryption of stored secrets. The key lies in a file of the home, outside the database."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from windlass.storage.files import sync_path

_KEY_FILE = "secrets.key"


class SealError(RuntimeError):
    """The key file is missing or broken, or is not the one that encrypted a secret."""


class SecretBox:
    """Encrypts and decrypts the secrets of one home. Homes that share a database need the same key file.

    The file is read at each use, so a restored file takes effect at once.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / _KEY_FILE

    def close(self, secret: str) -> str:
        """Encrypts a secret. Makes the key file if there is none, readable by its owner only. Raises SealError."""
        if not self._path.exists():
            self._make_key()
        return self._fernet().encrypt(secret.encode()).decode()

    def open(self, sealed: str) -> str:
        """Decrypts a secret. Raises SealError."""
        try:
            return self._fernet().decrypt(sealed.encode()).decode()
        except InvalidToken:
            raise SealError(f"the home's {_KEY_FILE} is not the one with which it was stored") from None

    def _fernet(self) -> Fernet:
        try:
            return Fernet(self._path.read_bytes())
        except OSError as error:
            raise SealError(f"the home's {_KEY_FILE} cannot be read: {error.strerror}") from None
        except ValueError:
            raise SealError(f"the home's {_KEY_FILE} holds no key") from None

    def _make_key(self) -> None:
        path = self._path
        # readable by its owner only
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-") as file:
            file.write(Fernet.generate_key())
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process has just made the file, which is then used
                os.link(file.name, path)
                sync_path(path.parent)  # else a power loss could take the key, and with it all encrypted secrets
