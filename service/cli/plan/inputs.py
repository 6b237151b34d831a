"""The model and the machine that the command `plan` is asked about."""

from pathlib import Path
from typing import Any, TypeVar

from windlass.amounts import GB
from windlass.planner.hardware import (
    Hardware,
    ModelShape,
    UnknownMachineError,
    UnknownSizeError,
    YamlFileError,
    load,
    machine_name,
    machine_of,
    published_model,
    published_shapes,
    similar_models,
)
from windlass.service.cli import CommandError, OptionError
from windlass.service.installation import HARDWARE_FILE, Settings
from windlass.service.validation import ApiError, model_dir

MEASURED = "measured"  # the name of this machine, as `windlass doctor` measured it
_Kind = TypeVar("_Kind", Hardware, ModelShape)
_PATHS = ("/", "./", "../", "~")  # beginnings of a path, which is no model's name
_SHAPE_FILES = (".yaml", ".yml")  # names of files with a shape


def hardware_of(settings: Settings, name: str) -> Hardware:
    """Returns the profile of a machine: measured, by name or from a file.

    A name as lists have it goes before a file or a box of the same name, and one that is written otherwise after them.

    Raises:
        CommandError: there is none.
        OptionError: the name is empty, or the machine has no such size.
    """
    if not name.strip():
        raise OptionError(f"--hardware: the name is empty; leave it out for this machine ('{MEASURED}'), or name one")
    if name == MEASURED:
        path = settings.home / HARDWARE_FILE
        if not path.exists():
            raise CommandError(f"--hardware: nothing was measured yet; run `windlass doctor`, which writes {path}")
        return _read("--hardware", Hardware, path)
    known, unknown = _known_machine(name)
    if known == name:
        return machine_of(name)
    if Path(name).is_dir():
        raise CommandError(f"--hardware: {name} is a folder; name a YAML file in it")
    if Path(name).exists():
        return _read("--hardware", Hardware, Path(name))
    boxes = _hardware_of_boxes(settings)
    if name in boxes:
        return boxes[name]
    if known is not None:
        return machine_of(known)
    if isinstance(unknown, UnknownSizeError):
        raise OptionError(f"--hardware: {unknown}")
    joined = f", and {', '.join(boxes)} {'is a box' if len(boxes) == 1 else 'are boxes'} of it" if boxes else ""
    raise CommandError(f"--hardware: there is no file {name}, and {unknown}; '{MEASURED}' is this machine{joined}")


def _read(option: str, kind: type[_Kind], path: Path) -> _Kind:
    """Reads a file that an option names. Raises CommandError, whose lines begin with the option."""
    try:
        return load(kind, path)
    except YamlFileError as error:
        raise CommandError("\n".join(f"{option}: {line}" for line in str(error).splitlines())) from None


def _known_machine(name: str) -> tuple[str | None, UnknownMachineError | None]:
    """Returns a machine's name as lists have it, or None and why there is none."""
    try:
        return machine_name(name), None
    except UnknownMachineError as error:
        return None, error


def _hardware_of_boxes(settings: Settings) -> dict[str, Hardware]:
    if not (settings.home / "cluster").is_dir():
        return {}
    from windlass.service.cluster.head import hardware_of_boxes  # it loads the database's library

    return hardware_of_boxes(settings)


def measured_network_gb_per_s(settings: Settings) -> float | None:
    """Returns the slowest rate that `windlass doctor --network` has measured between present boxes of this head.

    None: this home is no head, or nothing was measured.
    """
    if not (settings.home / "cluster").is_dir():
        return None
    from windlass.service.cluster.head import slowest_rate  # it loads the database's library

    rate = slowest_rate(settings)
    return None if rate is None else rate / GB


def config_of(settings: Settings, model: str, sequence_length: int) -> Any:
    """Reads the config of a model's folder or id, or makes that of a published model or of a shape's file.

    A model that is here goes before a published one of the same name.
    """
    if not model.strip():
        raise OptionError("--model: the name is empty; `windlass plan --help` says what it may be")
    if model.endswith(_SHAPE_FILES):
        if not Path(model).exists():
            raise CommandError(f"--model: there is no file {model}")
        return _config_of_shape_file(Path(model), sequence_length)
    folder = _model_folder(settings, model)
    if folder is None:
        if (path := published_model(model)) is not None:
            return _config_of_shape_file(path, sequence_length)
        if model.startswith(_PATHS):
            raise CommandError(f"--model: there is no folder {model} with a config.json")
        raise CommandError(f"--model: {_unknown_model(settings, model)}")
    from windlass.planner.profiling import FolderConfig, UnusableConfigError

    try:
        config = FolderConfig.read(folder)
        longest = config.longest
    except UnusableConfigError as error:
        raise CommandError(f"--model: {folder}: {' '.join(str(error).split())}") from None
    if longest is not None and sequence_length > longest:
        raise OptionError(f"--seq-len: {sequence_length}: the model in {folder} takes at most {longest} tokens")
    return config


def shape_name(settings: Settings, model: str) -> str | None:
    """Returns the name of the published shape that is planned. None: the model is here, or a file has its shape."""
    if model.endswith(_SHAPE_FILES) or _model_folder(settings, model) is not None:
        return None
    path = published_model(model)
    return None if path is None else path.stem


def _config_of_shape_file(path: Path, sequence_length: int) -> Any:
    from windlass.planner.profiling import ShapeConfig

    shape = _read("--model", ModelShape, path)
    if shape.max_tokens is not None and sequence_length > shape.max_tokens:
        raise OptionError(
            f"--seq-len: {sequence_length}: the model {path.stem} takes at most {shape.max_tokens} tokens"
        )
    return ShapeConfig(shape=shape, num_tokens=sequence_length)


def _model_folder(settings: Settings, model: str) -> Path | None:
    """Returns the folder of a model that is here: a path, or the id of a model of this installation."""
    return Path(model) if (Path(model) / "config.json").exists() else _folder_of_id(settings, model)


def _folder_of_id(settings: Settings, model: str) -> Path | None:
    try:
        folder = model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)
    except ApiError:
        return None
    return folder if (folder / "config.json").exists() else None


def _unknown_model(settings: Settings, model: str) -> str:
    near = similar_models(model)
    known = f"did you mean {' or '.join(near)}? Else" if near else f"they are {', '.join(published_shapes())}; else"
    required = [name for name, field in ModelShape.model_fields.items() if field.is_required()]
    return (
        f"there is no model {model}, neither in {settings.models_dir} nor among the published ones whose shapes are "
        f"known; {known} name a folder with a config.json, or a YAML file with {', '.join(required)}"
    )


def is_id(settings: Settings, model: str) -> bool:
    """Returns whether a job can name the planned model so. It cannot name a shape, or a folder elsewhere."""
    return _folder_of_id(settings, model) is not None
