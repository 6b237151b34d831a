"""Shapes of the models in the papers, and the largest models that the papers report."""

from dataclasses import dataclass

from windlass.planner.hardware import ModelShape, load, published_models

_VOCAB_SIZE = 50257  # Ratel, section V-A; AutoHete prints none for its GPT-like models

# By billions of parameters.
RATEL_SHAPES: dict[int, ModelShape] = {
    billions: load(ModelShape, published_models()[f"ratel-{billions}b"])
    for billions in (6, 13, 30, 70, 135, 175, 276, 412)
}
# The two models of its figure 8. Source: AutoHete, table 1, which does not print heads; here they have 128 elements.
AUTOHETE_SHAPES: dict[int, ModelShape] = {
    size: ModelShape(num_layers=num_layers, num_heads=32, hidden_size=4096, vocab_size=_VOCAB_SIZE)
    for size, num_layers in ((4, 21), (6, 32))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLargest:
    """The largest model that Ratel trains with this memory, batch 1: sections I and V-B, figure 6."""

    host_gb: int
    device_gib: int
    billions: int


PUBLISHED_LARGEST = (
    PublishedLargest(host_gb=256, device_gib=16, billions=175),  # RTX 4080
    PublishedLargest(host_gb=768, device_gib=24, billions=276),  # RTX 4090
)
# AutoHete, section 4.2: on a GPU of 40 GB, 13 of the 4B model's 21 blocks have their states in host memory.
AUTOHETE_RESIDENT = 21 - 13
