"""The audit of commands that work on the home without the API. The owner of the home's files may run them."""

import getpass
import os

from sqlalchemy.orm import Session

from windlass.storage.sql.repositories import AuditRepository

_PEER = "command line"


def record_command(session: Session, action: str, target: str) -> None:
    """Records that a command changed something, with the operating system's user who ran it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, a user without a name
        user = f"uid {os.getuid()}"
    AuditRepository(session).add(action, target, key_id=None, user=user, peer=_PEER)
