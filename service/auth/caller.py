"""Who asks, as far as what they may see and do goes."""

from dataclasses import dataclass

from sqlalchemy.orm import Session

from windlass.storage.sql.repositories import KeyRepository, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who made a request."""

    user: str | None  # None: somebody at this machine, while no key is needed
    role: Role
    key_id: str | None
    login: str | None = None  # digest of the login's token, where it was made by one
    peer: str | None = None  # address

    @property
    def only_of(self) -> str | None:
        """The user whose rows alone are there for this caller; None: everybody's are."""
        return None if self.role is Role.ADMIN else self.user

    def may_build_on(self, owner: str | None) -> bool:
        """Whether a job of this caller may use a file or a fine-tuned model of this owner: only its own.

        What nobody owns is from before there were keys, and admins may use it.
        """
        return owner == self.user or (owner is None and self.role is Role.ADMIN)

    def is_still_in(self, session: Session) -> bool:
        """Whether a request of the same caller would still be let in: for answers that take long."""
        keys = KeyRepository(session)
        if self.key_id is None:
            return not keys.is_needed()
        return keys.is_open(self.key_id, self.login)
