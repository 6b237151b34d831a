"""Profiles for micro-batches of different widths: sizes of the widest, operations and times of the mean one."""

from dataclasses import replace

import pytest

from windlass.engine.memory_plan.example_lengths import ExampleLengths
from windlass.planner.cost.model_profile import AgainTimes, ModelProfile, for_lengths
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.profiling.block_times import BlockTimes, with_times
from windlass.planner.profiling.model_profiler import config_of_shape, profile_config
from windlass.storage.ids import Precision

LLAMA = ModelShape(num_layers=2, hidden_size=64, num_heads=4, vocab_size=128, num_kv_heads=2, intermediate_size=96)


def profile_of(num_tokens: int) -> ModelProfile:
    config = config_of_shape(LLAMA, num_tokens=256)
    return profile_config(config, Precision.BF16, num_examples=2, num_tokens=num_tokens)


@pytest.mark.long
def test_for_lengths_has_the_flops_of_the_rows_and_the_bytes_of_the_widest() -> None:
    widest, near_mean = profile_of(256), profile_of(72)
    widths = (16, 48, 0, 256)
    mean = sum(widths) / len(widths)
    mean_square = sum(width**2 for width in widths) / len(widths)
    found = for_lengths(widest, near_mean, ExampleLengths(longest=256, mean=mean, mean_square=mean_square))
    there = [profile_of(width) for width in widths if width]
    for index, layer in enumerate(found.layers):
        assert layer.num_flops == pytest.approx(sum(each.layers[index].num_flops for each in there) / len(widths))
        assert layer.num_flops == sum(operator.num_flops for operator in layer.operators)
        assert layer.saved_nbytes == widest.layers[index].saved_nbytes
        assert layer.peak_nbytes == widest.layers[index].peak_nbytes
    assert found.head.num_flops == pytest.approx(sum(each.head.num_flops for each in there) / len(widths))
    assert found.num_tokens == 256
    assert found.size_share == pytest.approx(mean / 256)


def test_for_lengths_scales_what_was_measured_from_its_width_to_the_mean() -> None:
    again = AgainTimes(all_s=1.0, one_held_s=0.5, most_held_s=0.25)
    times = BlockTimes(forward_s=2.0, backward_s=4.0, again=again)
    near_mean = with_times(profile_of(16), dict.fromkeys(range(4), times))
    found = for_lengths(profile_of(256), near_mean, ExampleLengths(longest=256, mean=20.0, mean_square=900.0))
    assert found.embedding.backward_s == pytest.approx(4.0 * 20 / 16)
    assert found.head.forward_s == pytest.approx(2.0 * 20 / 16)
    layer, measured = found.layers[0], near_mean.layers[0]
    factor = layer.num_flops / measured.num_flops
    assert factor > 20 / 16, "attention takes more where widths differ"
    assert (layer.forward_s, layer.backward_s) == (pytest.approx(2.0 * factor), pytest.approx(4.0 * factor))
    assert layer.again is not None
    assert layer.again.all_s == pytest.approx(factor)


def test_for_lengths_of_equal_examples_is_the_profile_at_their_width() -> None:
    profile = profile_of(64)
    found = for_lengths(profile, profile, ExampleLengths(longest=64, mean=64.0, mean_square=4096.0))
    assert found == replace(profile, mean_tokens=64.0)
    assert found.size_share == 1.0
