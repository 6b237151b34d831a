from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.windlass_runner import placement_of, with_room
from tests.support.training import make_spec
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import ACTIVATION_SLOT_NBYTES, Placement

NUM_LAYERS = 3


def test_a_placement_in_words() -> None:
    found = placement_of(["host_blocks=2", "activations=keep", "num_cached_params=7"], NUM_LAYERS + 2)
    keep = ActivationChoice.KEEP.of_layers(NUM_LAYERS)
    assert found == Placement(host_blocks=(0, 1), num_cached_params=7, activations=keep)
    with pytest.raises(ValueError, match="'none' is not a valid ActivationChoice"):
        placement_of(["activations=none"], NUM_LAYERS + 2)


def test_slots_for_swapped_activations_are_added_if_not_given(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, num_microbatches=2)
    inputs = replace(spec, placement=placement_of(["activations=recompute_swap_input"], NUM_LAYERS + 2))
    # One small put for each layer and micro-batch.
    assert with_room(inputs).placement.host_activation_nbytes == NUM_LAYERS * 2 * ACTIVATION_SLOT_NBYTES
    for words in (["activations=swap", "ssd_activation_nbytes=9"], ["activations=keep"], []):
        given = replace(spec, placement=placement_of(words, NUM_LAYERS + 2))
        assert with_room(given) is given
