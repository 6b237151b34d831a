"""Ids of models, and the folders that they name.

A base model is a folder of the models directory, `name` or `organization/name`; the second form may also be a
repository of the hub. A fine-tuned model is `ft:{base}:{suffix}:{job}`, and its checkpoints add `-step-{n}`. The folder
has the same name. No id from a request can name a folder outside these two directories.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from windlass.service.validation.request_errors import ApiError, describe_value

# The hub's own limit is 96 characters per component.
_COMPONENT = r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_BASE_ID = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})?")
_FINE_TUNED_ID = re.compile(
    r"ft:(?P<base>[A-Za-z0-9_][A-Za-z0-9._-]*):[A-Za-z0-9._-]*:(?P<job>[A-Za-z0-9]+)(?:-step-[0-9]+)?"
)
SUFFIX = r"^[A-Za-z0-9._-]{1,64}$"
_SUFFIX = re.compile(SUFFIX.removeprefix("^").removesuffix("$"))
_MAX_ID_CHARS = 200


def is_fine_tuned_id(model: str) -> bool:
    """Returns whether a well-formed id names a fine-tuned model or a checkpoint."""
    return len(model) <= _MAX_ID_CHARS and _FINE_TUNED_ID.fullmatch(model) is not None


def is_hub_id(model: str) -> bool:
    """Returns whether a model that is not here may be a repository of the hub."""
    return "/" in model and _BASE_ID.fullmatch(model) is not None


def check_model_id(model: str, param: str = "model") -> None:
    """Raises ApiError unless the id is well-formed."""
    if len(model) > _MAX_ID_CHARS or not (is_fine_tuned_id(model) or _BASE_ID.fullmatch(model)):
        raise ApiError(
            f"{param}: a model is named by its folder in the models directory, 'name' or 'organization/name', by a hub "
            f"id, or by a fine-tuned model's id 'ft:…'; never by a path; got {describe_value(model)}",
            param=param,
            code="invalid_model_id",
        )


def check_suffix(suffix: str) -> str:
    """Returns a suffix that can be part of a model's id. Raises ValueError for any other."""
    if not _SUFFIX.fullmatch(suffix):
        raise ValueError("must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return suffix


def fine_tuned_model_id(model: str, suffix: str | None, job_id: str) -> str:
    """Returns the id of the model that a job makes from `model`."""
    fine_tuned = _FINE_TUNED_ID.fullmatch(model)
    base = fine_tuned["base"] if fine_tuned else model.rsplit("/", 1)[-1]
    return f"ft:{base}:{suffix or ''}:{job_id.removeprefix('ftjob-')[:12]}"


def job_id_prefix(model: str) -> str | None:
    """Returns the first characters of the id of the job that made a fine-tuned model or a checkpoint.

    None for a base model.
    """
    fine_tuned = _FINE_TUNED_ID.fullmatch(model)
    return f"ftjob-{fine_tuned['job']}" if fine_tuned else None


def models_in(folder: Path) -> Iterator[str]:
    """Yields the ids of the models in a folder: `name`, or `organization/name`."""
    for path in _subfolders(folder):
        if (path / "config.json").is_file():
            yield path.name
        else:
            yield from (f"{path.name}/{sub.name}" for sub in _subfolders(path))


def _subfolders(path: Path) -> list[Path]:
    return sorted(folder for folder in path.iterdir() if folder.is_dir()) if path.is_dir() else []


def model_dir(model: str, *, models_dir: Path, fine_tuned_dir: Path) -> Path:
    """Returns the folder of a model's id, which need not exist. Raises ApiError for an ill-formed id."""
    check_model_id(model)
    return (fine_tuned_dir if is_fine_tuned_id(model) else models_dir) / model
