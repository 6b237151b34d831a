"""The caller of a request, with the rights to see and to change objects."""

from dataclasses import dataclass

from sqlalchemy.orm import Session

from windlass.storage.sql.repositories import KeyRepository, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of a request."""

    user: str | None  # None: a user of this machine, while no key is needed
    role: Role
    key_id: str | None
    login: str | None = None  # digest of the login's token, if the request came with a login
    peer: str | None = None  # address

    @property
    def only_of(self) -> str | None:
        """The user whose rows the caller may see. None: the caller sees all users' rows."""
        return None if self.role is Role.ADMIN else self.user

    def may_build_on(self, owner: str | None) -> bool:
        """Returns whether this caller's job may use a file or a fine-tuned model of `owner`.

        Users may use their own only.

        An object without an owner was made while no key was needed. Administrators may use it.
        """
        return owner == self.user or (owner is None and self.role is Role.ADMIN)

    def is_still_in(self, session: Session) -> bool:
        """Returns whether the caller still has access. Long answers check it again while they last."""
        keys = KeyRepository(session)
        if self.key_id is None:
            return not keys.is_needed()
        return keys.is_open(self.key_id, self.login)
