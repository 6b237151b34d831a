"""A check, made when a job is created, that its model exists and can be trained here.

It refuses models without safetensors and models with code of their own.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.service.installation import Settings
from windlass.service.validation import DEFAULT_SEQUENCE_LENGTH, ApiError, is_hub_id, model_dir

_HUB_TIMEOUT_S = 10.0
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """The facts about a model that are known before its job starts."""

    max_sequence_length: int | None  # limit of its position encoding; None: unknown


# Lists the files of a repository on the hub. Raises LookupError with a reason if it cannot.
HubFiles = Callable[[str], list[str]]


def check_model(
    settings: Settings,
    model: str,
    *,
    random_weights: bool,
    hub_files: HubFiles,
    is_visible: bool = True,
    hint: Callable[[], str] = str,
) -> CheckedModel:
    """Checks that a job may start from `model`. Raises ApiError with param "model" if not.

    A model that the caller may not see counts as missing. `hint` makes the suggestion in the error about a missing
    model.
    """
    folder = model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)
    if is_visible and folder.is_dir():
        names = [path.name for path in folder.iterdir()]
        _check_files(model, names, random_weights)
        return _check_config(model, folder / "config.json")
    if not is_hub_id(model):
        raise _not_found(f"there is no model {model!r} here{hint()}; `windlass models` and GET /v1/models list all")
    try:
        names = hub_files(model)
    except LookupError as error:
        raise _not_found(f"there is no model {model!r} here{hint()}, and {error}") from None
    _check_files(model, names, random_weights)
    return CheckedModel(max_sequence_length=None)  # checked once the job has downloaded the folder


def fit_sequence_length(
    asked: int | None, checked: CheckedModel, *, param: str = "windlass.sequence_length"
) -> int | None:
    """Returns a job's sequence length on this model, or None if neither a request nor a limit is known.

    `param`: the place of the requested length in the request. Raises ApiError if it exceeds the model's limit.
    """
    limit = checked.max_sequence_length
    if limit is None:
        return asked
    if asked is not None and asked > limit:
        raise ApiError(
            f"{param}: the model takes at most {limit} tokens, got {asked}",
            param=param,
            code="invalid_value",
        )
    return asked or min(DEFAULT_SEQUENCE_LENGTH, limit)


def list_hub_files(model: str) -> list[str]:
    """Lists the files of a hub repository. Raises LookupError if the hub has no such model or is unreachable."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "ON", "YES"):
        raise LookupError("HF_HUB_OFFLINE is set, so the hub is not asked")
    # Imported here, because the import takes long and most services do not need it.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = HfApi().model_info(model, timeout=_HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise LookupError("the hub has no such public model") from None
    except Exception as error:  # noqa: BLE001 - the HTTP library below, and what it raises, depends on the hub's version
        raise LookupError(f"the hub could not be reached ({type(error).__name__})") from None
    return [str(file.rfilename) for file in info.siblings or ()]


def _not_found(message: str) -> ApiError:
    return ApiError(f"model: {message}", status=404, param="model", code="model_not_found")


def _unusable(model: str, reason: str) -> ApiError:
    return ApiError(f"model: {model!r} can't be trained: {reason}", param="model", code="model_not_supported")


def _check_files(model: str, names: list[str], random_weights: bool) -> None:
    if "config.json" not in names:
        raise _unusable(model, "it has no config.json")
    if random_weights or any(name.endswith(".safetensors") for name in names):
        return
    reason = "it has no *.safetensors"
    if pickled := [name for name in sorted(names) if name.endswith(_PICKLE_SUFFIXES)]:
        reason += f"; {pickled[0]} may run code when it is read: convert it to safetensors first"
    else:
        reason += '; windlass.initialization "random" trains without weights'
    raise _unusable(model, reason)


def _check_config(model: str, path: Path) -> CheckedModel:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _unusable(model, f"its config.json can't be read: {error}") from None
    if not isinstance(config, dict):
        raise _unusable(model, "its config.json holds no object")
    if "auto_map" in config:
        raise _unusable(model, "its config.json asks for code of its own (auto_map), which is never run")
    return CheckedModel(max_sequence_length=_max_sequence_length(config))


def _max_sequence_length(config: dict[str, Any]) -> int | None:
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, dict) else {}):
        for key in ("max_position_embeddings", "n_positions"):
            value = source.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return None
