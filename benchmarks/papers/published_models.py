"""Shapes of the models in the papers, and the largest models that the papers report."""

from dataclasses import dataclass

from windlass.planner.hardware import ModelShape

_VOCAB_SIZE = 50257  # Ratel, section V-A; AutoHete prints none for its GPT-like models

# By billions of parameters. Source: Ratel (arXiv 2403.06504), table IV.
RATEL_SHAPES: dict[int, ModelShape] = {
    size: ModelShape(num_layers=num_layers, num_heads=num_heads, hidden_size=hidden_size, vocab_size=_VOCAB_SIZE)
    for size, num_layers, num_heads, hidden_size in (
        (6, 28, 32, 4096),
        (13, 40, 40, 5120),
        (30, 48, 56, 7168),
        (70, 80, 64, 8192),
        (135, 88, 88, 11264),
        (175, 96, 96, 12288),
        (276, 112, 112, 14336),
        (412, 128, 128, 16384),
    )
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
