"""Whose a fine-tuned model is: its job's owner's. Base models are everybody's."""

from sqlalchemy.orm import Session

from windlass.service.access import Caller
from windlass.service.errors import ApiError
from windlass.service.model_ids import job_id_prefix
from windlass.storage.sql.deletion import DeletionRepository
from windlass.storage.sql.jobs import JobRepository


def is_visible(session: Session, caller: Caller, model: str) -> bool:
    """Whether a model is there for a caller. What no job is known to have made is there for admins."""
    prefix = job_id_prefix(model)
    if prefix is None:
        return True
    if DeletionRepository(session).is_doomed(model, prefix):
        return False  # its folder may still be there
    return caller.only_of is None or _owner(session, prefix) == caller.only_of


def check_may_build_on(session: Session, caller: Caller, model: str) -> None:
    """Raise ApiError where a model that the caller sees is not for the caller's jobs."""
    prefix = job_id_prefix(model)
    if prefix is not None and not caller.may_build_on(owner := _owner(session, prefix)):
        raise ApiError(
            f"model: {model!r} belongs to user {owner!r}; a job builds on its own user's models",
            param="model",
            code="not_yours",
        )


def _owner(session: Session, prefix: str) -> str | None:
    owners = set(JobRepository(session).owners_by_prefix(prefix))
    return owners.pop() if len(owners) == 1 else None
