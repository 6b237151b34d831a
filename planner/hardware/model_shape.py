"""The sizes of a model, for users who plan a model that does not exist yet or that is not here."""

import difflib
import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from windlass.planner.hardware.yaml_files import Part, load

# Limits against typing errors, far beyond any model, because a larger search would not end.
_MOST_LAYERS = 10_000
_MOST_NEAR_NAMES = 3
# Minimum similarity (`difflib`'s ratio) at which a family or an organization counts as a misspelt one.
_MISSPELT = 0.75
# The organizations whose models have the published shapes, by the letters that the names of a family begin with.
_ORGANIZATIONS = {"gpt": "openai-community", "llama": "meta-llama", "mistral": "mistralai", "qwen": "Qwen"}
# Families without a published shape that are spelt like one with shapes.
_OTHER_FAMILIES = frozenset({"mixtral"})
# Words in names on the hub that tell how a model was trained, or its format. Its shape is the same without them.
_SAME_SHAPE = frozenset({"base", "chat", "hf", "instruct", "it"})
# Shapes whose models have another name on the hub, by that name without these words. Other versions have other shapes.
_NAMES_ON_HUB = {
    "mistral-7b-v0.3": "mistral-7b",
    "mistral-large-2407": "mistral-large-123b",
    "mistral-small-24b-2501": "mistral-small-24b",
}
_Size = Annotated[int, Field(ge=1, le=2**24)]


class ModelShape(Part):
    """The sizes of a decoder.

    With neither `num_kv_heads` nor `intermediate_size` it has GPT's shape, with an MLP of 4 x hidden. Otherwise it has
    Llama's shape, with the two additions of Qwen2 (`qkv_bias`) or Qwen3 (`qk_norm`) if they are set.
    """

    num_layers: Annotated[int, Field(ge=1, le=_MOST_LAYERS)]
    hidden_size: _Size
    num_heads: _Size
    vocab_size: _Size
    num_kv_heads: _Size | None = None
    intermediate_size: _Size | None = None
    head_dim: _Size | None = None  # elements of a head; None: hidden_size / num_heads
    # The head uses the embedding's matrix. None: as usual, which is tied for GPT's shape and not for Llama's.
    tied_embeddings: bool | None = None
    qkv_bias: bool = False  # queries, keys and values have biases
    qk_norm: bool = False  # each head's queries and keys are normalized
    max_tokens: _Size | None = None  # longest sequence of the published model; None: as long as is planned

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size: {self.hidden_size} is no multiple of num_heads, {self.num_heads}")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: {self.num_heads} is no multiple of num_kv_heads, {self.num_kv_heads}")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim: heads of {self.head_dim} elements cannot be rotated in pairs; it must be even")
        if not self.is_gpt and self.head_size % 2:
            raise ValueError(
                f"hidden_size: heads of {self.head_size} elements cannot be rotated in pairs; "
                "hidden_size over num_heads must be even"
            )
        return self

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        of_llama = {"head_dim": self.head_dim is not None, "qkv_bias": self.qkv_bias, "qk_norm": self.qk_norm}
        if self.is_gpt and any(of_llama.values()):
            key = next(key for key, is_set in of_llama.items() if is_set)
            raise ValueError(f"{key}: GPT's shape has no such field; give num_kv_heads or intermediate_size, too")
        if self.qkv_bias and self.qk_norm:
            raise ValueError("qk_norm: no model that windlass knows has both qkv_bias and qk_norm")
        return self

    @property
    def is_gpt(self) -> bool:
        """True if the model has GPT's shape, False if it has Llama's."""
        return self.num_kv_heads is None and self.intermediate_size is None

    @property
    def head_size(self) -> int:
        """The number of elements of a head's queries for a token."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def is_tied(self) -> bool:
        """True if the head uses the embedding's matrix."""
        return self.is_gpt if self.tied_embeddings is None else self.tied_embeddings


def published_models() -> dict[str, Path]:
    """Returns the shapes of published models that ship with windlass, by name."""
    return {path.stem: path for path in (Path(__file__).parent / "models").glob("*.yaml")}


def published_shapes() -> dict[str, ModelShape]:
    """Returns the published models by name, as lists have them: each version's models by their size."""

    def place(item: tuple[str, ModelShape]) -> tuple[str, int]:
        name, shape = item
        return _version_of(name), shape.num_layers * shape.hidden_size**2

    return dict(sorted(((name, load(ModelShape, path)) for name, path in published_models().items()), key=place))


def published_model(name: str) -> Path | None:
    """Returns the shape of a published model by its name here or on the hub; None: it is not known.

    `meta-llama/Llama-3.1-8B-Instruct` has the shape `llama-3.1-8b`. Upper case, and words for a model's training or
    format make no difference. The organization may be another one, which copied the model, but no misspelt one, and
    none that published another of these models. A path is no name.
    """
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or _meant_organization(name) is not None:
        return None
    return published_models().get(_shape_of(name))


def organization_of(shape: str) -> str | None:
    """Returns the organization whose models on the hub have a published shape; None for a shape of a paper."""
    return _ORGANIZATIONS.get(_family_of(shape))


def similar_models(name: str) -> list[str]:
    """Returns the published models whose names are near to a name, the nearest first.

    They are of its family, which may be misspelt: another family is another model, however alike the names are. If only
    the organization of a Hugging Face id is wrong, the id with the right one is returned.
    """
    shape, organization = _shape_of(name), _meant_organization(name)
    if organization is not None and shape in published_models():
        return [f"{organization}/{name.rpartition('/')[2]}"]
    families = {_family_of(each) for each in published_models()}
    family = _family_of(shape)
    if family not in families | _OTHER_FAMILIES:
        family = next(iter(difflib.get_close_matches(family, families, n=1, cutoff=_MISSPELT)), family)
    names = sorted(each for each in published_models() if _family_of(each) == family)
    return difflib.get_close_matches(shape, names, n=_MOST_NEAR_NAMES, cutoff=0.0)


def _meant_organization(name: str) -> str | None:
    """Returns the organization that a Hugging Face id should have. None: its own, or none, may be right."""
    organization, slash, _ = name.rpartition("/")
    right = organization_of(_shape_of(name))
    written = organization.casefold()
    if not slash or right is None or written == right.casefold():
        return None
    known = [each.casefold() for each in _ORGANIZATIONS.values()]
    return right if difflib.get_close_matches(written, known, n=1, cutoff=_MISSPELT) else None


def _family_of(plain: str) -> str:
    """Returns the letters that a plain name begins with: llama of llama-3.1-8b."""
    letters = re.match("[a-z]*", plain)
    return letters.group() if letters else ""


def _version_of(plain: str) -> str:
    """Returns a plain name without the model's size: llama-3.1 of llama-3.1-8b, and gpt2 of gpt2-xl."""
    version = re.match(r"[a-z]+(-?[0-9.]+)?(?=-|$)", plain)
    return version.group() if version else plain


def _shape_of(name: str) -> str:
    """Returns the name that a model's shape has here, if it is known."""
    plain = _plain_name(name)
    return _NAMES_ON_HUB.get(plain, plain)


def _plain_name(name: str) -> str:
    """Returns a name without the organization, in lower case, and without words that leave the shape as it is."""
    words = name.rpartition("/")[2].lower().removeprefix("meta-").split("-")
    return "-".join(word for word in words if word not in _SAME_SHAPE)
