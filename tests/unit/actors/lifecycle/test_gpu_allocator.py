"""A person's settings of the GPU allocator count; else segments are expandable."""

from windlass.actors.lifecycle.gpu_allocator import allocator_settings


def test_without_settings_segments_are_expandable() -> None:
    assert allocator_settings({"HOME": "/"}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_settings_of_a_person_are_kept() -> None:
    chosen = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    assert allocator_settings({"HOME": "/", **chosen}) == chosen
