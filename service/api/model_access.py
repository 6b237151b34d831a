"""Access to models: a fine-tuned model belongs to its job's owner, and base models are visible to all users."""

from sqlalchemy.orm import Session

from windlass.service.api.context import Context
from windlass.service.auth import Caller
from windlass.service.validation import ApiError, job_id_prefix, models_in, near_names
from windlass.storage.sql.repositories import DeletionRepository, JobRepository


def is_visible(session: Session, caller: Caller, model: str) -> bool:
    """Returns whether the caller may see a model. Only administrators see a model that belongs to no known job."""
    prefix = job_id_prefix(model)
    if prefix is None:
        return True
    if DeletionRepository(session).is_doomed(model, prefix):
        return False  # its folder may still exist
    return caller.only_of is None or _owner(session, prefix) == caller.only_of


def model_hint(context: Context, caller: Caller, model: str) -> str:
    """Suggests a name close to an unknown model's, among the models that the caller sees.

    Returns "" if none is close.
    """
    folders = (context.settings.models_dir, context.settings.fine_tuned_dir)
    known = [name for folder in folders for name in models_in(folder)]
    with context.database.read() as session:
        near = (name for name in near_names(model, known, separator="/") if is_visible(session, caller, name))
        found = next(near, None)
    return "" if found is None else f" (did you mean {found!r}?)"


def check_may_build_on(session: Session, caller: Caller, model: str) -> None:
    """Raises ApiError if the caller sees the model but may not base a job on it."""
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
