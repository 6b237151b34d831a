"""The sizes of a model, for users who plan a model that does not exist yet."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from windlass.planner.hardware.yaml_files import Part

# Limits against typing errors, far beyond any model, because a larger search would not end.
_MOST_LAYERS = 10_000
_Size = Annotated[int, Field(ge=1, le=2**24)]


class ModelShape(Part):
    """The sizes of a decoder.

    With neither `num_kv_heads` nor `intermediate_size` it has GPT's shape, with an MLP of 4 x hidden. Otherwise it has
    Llama's shape.
    """

    num_layers: Annotated[int, Field(ge=1, le=_MOST_LAYERS)]
    hidden_size: _Size
    num_heads: _Size
    vocab_size: _Size
    num_kv_heads: _Size | None = None
    intermediate_size: _Size | None = None

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size: {self.hidden_size} is no multiple of num_heads, {self.num_heads}")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: {self.num_heads} is no multiple of num_kv_heads, {self.num_kv_heads}")
        if not self.is_gpt and self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"hidden_size: heads of {self.hidden_size // self.num_heads} elements cannot be rotated in pairs; "
                "hidden_size over num_heads must be even"
            )
        return self

    @property
    def is_gpt(self) -> bool:
        """True if the model has GPT's shape, False if it has Llama's."""
        return self.num_kv_heads is None and self.intermediate_size is None
