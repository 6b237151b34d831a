"""The configs of models that are planned. They are read without torch, and loaded by transformers only where needed."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it needs pydantic, which the GPU check does without
    from windlass.planner.hardware import ModelShape

CONFIG_FILE = "config.json"


# Fields with the longest sequence that a model takes, in the families that name it.
_LONGEST = ("max_position_embeddings", "n_positions")


class UnusableConfigError(ValueError):
    """The config of a model's folder cannot be used. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeConfig:
    """A model by its sizes, without dropout, for sequences of up to `num_tokens` tokens."""

    shape: "ModelShape"
    num_tokens: int

    def load(self) -> Any:
        """Returns the transformers config."""
        from windlass.planner.profiling.model_profiler import config_of_shape

        return config_of_shape(self.shape, num_tokens=self.num_tokens)

    @property
    def longest(self) -> int | None:
        """The longest sequence that the published model takes; None: it is as long as is planned."""
        return self.shape.max_tokens

    @property
    def content(self) -> dict[str, Any]:
        """All that decides the model, as JSON values."""
        return {"shape": self.shape.model_dump(mode="json"), "num_tokens": self.num_tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderConfig:
    """The config of a model's folder."""

    folder: Path
    content: Mapping[str, Any]  # of its config.json

    @classmethod
    def read(cls, folder: Path) -> "FolderConfig":
        """Reads a folder's config. Raises UnusableConfigError if there is none that is a JSON object."""
        try:
            content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UnusableConfigError(f"the config of {folder.name} cannot be used: {error}") from error
        if not isinstance(content, dict):
            raise UnusableConfigError(f"the config of {folder.name} cannot be used: it is no JSON object")
        return cls(folder=folder, content=content)

    def load(self) -> Any:
        """Returns the transformers config. Raises UnusableConfigError if transformers cannot use it."""
        try:
            return _load(self.folder, json.dumps(self.content, sort_keys=True))
        except ValueError as error:
            raise UnusableConfigError(str(error)) from error

    @property
    def longest(self) -> int | None:
        """The longest sequence that the model takes; None: it does not say.

        It needs transformers where the file leaves it to the default of the architecture.
        """
        text = self.content.get("text_config")
        for content in (self.content, text if isinstance(text, dict) else {}):
            for name in _LONGEST:
                if isinstance(content.get(name), int):
                    return int(content[name])
        longest = getattr(self.load(), "max_position_embeddings", None)
        return longest if isinstance(longest, int) else None


ModelConfig = ShapeConfig | FolderConfig


def longest_of(config: Any) -> int | None:
    """Returns the longest sequence that a model takes; None: it is not known from its file, or there is no limit."""
    return config.longest if isinstance(config, ShapeConfig | FolderConfig) else None


def read_config(path: Path, num_tokens: int) -> ModelConfig:
    """Reads the config of a model's folder, or of a YAML file with a shape.

    `num_tokens`: the longest sequence that a shape gets.

    Raises:
        UnusableConfigError: the folder has no config that is a JSON object.
        YamlFileError: the file has no shape.
    """
    if not path.is_file():
        return FolderConfig.read(path)
    from windlass.planner.hardware import ModelShape, load

    return ShapeConfig(shape=load(ModelShape, path), num_tokens=num_tokens)


@functools.lru_cache(maxsize=4)
def _load(folder: Path, content: str) -> Any:
    """Loads a folder's config. `content`: part of the key, because the file may change while this process lives."""
    from windlass.engine.model import load_config

    return load_config(folder)


def loaded(config: Any) -> Any:
    """Returns the transformers config of a model's config, which may be one already."""
    return config.load() if isinstance(config, ModelConfig) else config


def content_of(config: Any) -> dict[str, Any]:
    """Returns the content of a config, or of a transformers config, as values for a cache's key."""
    content = config.content if isinstance(config, ModelConfig) else config.to_dict()
    return {name: value for name, value in content.items() if name != "_name_or_path"}
