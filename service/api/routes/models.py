"""`/v1/models`: the base models of this installation, and the models fine-tuned from them."""

from collections.abc import Iterator
from pathlib import Path

from fastapi import APIRouter

from windlass.service.api import AuditDep, CallerDep, Context, ContextDep, Deleted, ListOf, is_visible, model_hint
from windlass.service.api.schemas import ModelObject
from windlass.service.auth import Caller
from windlass.service.data import Tally, deletion
from windlass.service.installation import Settings
from windlass.service.validation import ApiError, check_model_id, is_fine_tuned_id, model_dir, models_in

router = APIRouter(prefix="/v1/models")


@router.get("")
def list_models(context: ContextDep, caller: CallerDep) -> ListOf[ModelObject]:
    """Lists all models, latest change first."""
    with context.database.read() as session:
        found = [model for model in _model_ids(context.settings) if is_visible(session, caller, model)]
    models = [_model_object(context.settings, model) for model in found]
    models.sort(key=lambda model: (-model.created, model.id))
    return ListOf(data=models)


@router.get("/{model:path}")
def retrieve_model(context: ContextDep, caller: CallerDep, model: str) -> ModelObject:
    """Returns a model."""
    found = _visible_model(context, caller, model)
    return found.model_copy(update={"windlass": {"bytes": Tally().nbytes(_folder(context.settings, model))}})


@router.delete("/{model:path}")
def delete_model(context: ContextDep, caller: CallerDep, audit: AuditDep, model: str) -> Deleted:
    """Deletes a fine-tuned model or a checkpoint with its files."""
    _visible_model(context, caller, model)
    if not is_fine_tuned_id(model):
        raise ApiError(
            f"model: {model!r} is a base model; only fine-tuned models are deleted here",
            param="model",
            code="not_deletable",
        )
    with context.database.write() as session:
        removal = deletion.delete_model(session, context.settings, model, only_of=caller.only_of)
        audit(session, model)
    deletion.carry_out(context.database, context.settings, removal)
    return Deleted(id=model, object="model")


def _visible_model(context: Context, caller: Caller, model: str) -> ModelObject:
    check_model_id(model)
    with context.database.read() as session:
        visible = is_visible(session, caller, model)
    if not (visible and (_folder(context.settings, model) / "config.json").is_file()):
        raise _not_here(model, model_hint(context, caller, model))
    return _model_object(context.settings, model)


def _folder(settings: Settings, model: str) -> Path:
    return model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)


def _model_object(settings: Settings, model: str) -> ModelObject:
    try:
        created_s = (_folder(settings, model) / "config.json").stat().st_mtime
    except OSError:
        raise _not_here(model) from None
    owner = "user" if is_fine_tuned_id(model) else "local"
    return ModelObject(id=model, created=int(created_s), owned_by=owner)


def _not_here(model: str, hint: str = "") -> ApiError:
    return ApiError(f"model: there is no model {model!r} here{hint}", status=404, param="model", code="model_not_found")


def _model_ids(settings: Settings) -> Iterator[str]:
    for folder in (settings.models_dir, settings.fine_tuned_dir):
        yield from (model for model in models_in(folder) if _is_listed(settings, model))


def _is_listed(settings: Settings, model: str) -> bool:
    try:
        return (_folder(settings, model) / "config.json").is_file()
    except ApiError:  # a folder whose name is not a model id
        return False
