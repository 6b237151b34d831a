"""The largest model that fits: the device's bytes by hand, and more memory never allows less."""

from dataclasses import replace

import pytest

from benchmarks.papers.decoder_sizes import gpt_profile
from benchmarks.papers.largest_model import (
    BareModel,
    autohete_resident_layers,
    device_memory,
    fits,
    least_arena_nbytes,
    most_resident_layers,
)
from benchmarks.papers.published.models import AUTOHETE_RESIDENT, AUTOHETE_SHAPES
from windlass.amounts import GIB
from windlass.engine.memory_plan.arena.layout import make_plan
from windlass.engine.memory_plan.plan import PlanError
from windlass.engine.memory_plan.queue_depths import LEAVING_ACTIVATION_NBYTES
from windlass.planner.hardware.model_shape import ModelShape

SHAPE = ModelShape(num_layers=4, hidden_size=64, num_heads=4, vocab_size=96)
TABLE, POSITIONS, LAYER = 96 * 64, 32 * 64, 12 * 64 * 64 + 13 * 64
NORM = 2 * 64


def model(
    *, shape: ModelShape = SHAPE, is_tied: bool = False, num_examples: int = 1, num_head_tokens: int = 1000
) -> BareModel:
    profile = gpt_profile(shape, num_examples=num_examples, num_tokens=32, chunk_numel=2**14, is_tied=is_tied)
    return BareModel(shape=shape, profile=profile, num_head_tokens=num_head_tokens)


def test_the_device_holds_two_layers_two_gradients_and_the_ends() -> None:
    found = device_memory(model(), streams_layers=False)
    ends = TABLE + POSITIONS + TABLE + NORM
    assert found.params == found.grads == 2 * (2 * LAYER + ends)
    assert (found.matrix_grad, found.states) == (2 * 4 * 64 * 64, 0)
    hidden = 32 * 64
    assert found.activations == (34 + 2 * SHAPE.num_layers) * hidden + (4 + 12) * 32 * 96
    assert found.total == sum((found.params, found.grads, found.matrix_grad, found.activations, found.context))


def test_a_layer_that_comes_in_pieces_needs_two_of_its_largest_matrix() -> None:
    whole, pieces = (device_memory(model(), streams_layers=streams) for streams in (False, True))
    assert pieces.params == whole.params - 2 * 2 * LAYER + 2 * 2 * (4 * 64 * 64 + 13 * 64)
    assert replace(pieces, params=whole.params) == whole


def test_sums_of_tied_and_sliced_matrices_are_fp32() -> None:
    # A sum for each use, rounded in place; no head.
    embedding = TABLE + POSITIONS
    tied = device_memory(model(is_tied=True), streams_layers=False).grads
    assert tied == 2 * (2 * LAYER + NORM) + 2 * 4 * embedding
    sliced = device_memory(model(num_head_tokens=31), streams_layers=False)
    assert sliced.grads == device_memory(model(), streams_layers=False).grads + 2 * (TABLE + NORM)
    assert device_memory(model(is_tied=True, num_head_tokens=31), streams_layers=False).grads == tied + 2 * NORM


def test_logits_are_those_of_a_slice() -> None:
    whole, sliced = (device_memory(model(num_head_tokens=n), streams_layers=False).activations for n in (32, 8))
    assert whole - sliced == (4 + 12) * 24 * 96


def test_device_memory_does_not_grow_with_inputs_of_layers() -> None:
    shape = SHAPE.model_copy(update={"num_layers": 40})
    few, many = (device_memory(model(shape=shape, num_examples=n), streams_layers=False) for n in (2**10, 2**14))
    inputs = 2 * 40 * 2**10 * 32 * 64
    assert inputs < LEAVING_ACTIVATION_NBYTES < 16 * inputs
    assert many.activations < 16 * few.activations - 15 * inputs + LEAVING_ACTIVATION_NBYTES


def test_states_on_the_device_take_14_bytes_a_parameter_and_no_copy_in_16_bits() -> None:
    found = device_memory(model(), streams_layers=False, resident=(1, 2))
    without = device_memory(model(), streams_layers=False)
    assert found.states == 12 * 2 * LAYER
    assert found.grads - without.grads == 2 * 2 * LAYER
    assert found.params == without.params


def test_as_many_layers_are_resident_as_fit() -> None:
    sizes = [device_memory(model(), streams_layers=False, resident=range(1, number + 1)).total for number in range(5)]
    assert [most_resident_layers(model(), nbytes) for nbytes in (sizes[0] - 1, *sizes, 10 * GIB)] == [
        None,
        *range(5),
        4,
    ]


def test_autohete_takes_14_bytes_for_what_stays_and_2_for_what_is_computed() -> None:
    """Equation 1. Its figure for the 4B model at 40 GB matches with the batch size of its other runs."""
    hidden, layer = 32 * 64, 2 * LAYER
    at_least = (2 * 4 + 34) * hidden + 2 * (TABLE + POSITIONS) + 12 * 32 * 96 + layer
    found = [autohete_resident_layers(model(is_tied=True), at_least + more) for more in (-1, 0, 7 * layer, 10**9)]
    assert found == [None, 0, 1, 4]
    profile = gpt_profile(AUTOHETE_SHAPES[4], num_examples=16, num_tokens=1024, chunk_numel=2**24)
    bare = BareModel(shape=AUTOHETE_SHAPES[4], profile=profile, num_head_tokens=1024)
    assert autohete_resident_layers(bare, 40 * 10**9) == AUTOHETE_RESIDENT


@pytest.mark.parametrize("keep_grads", [False, True])
def test_the_least_arena_is_the_least(keep_grads: bool) -> None:
    shape = SHAPE.model_copy(update={"hidden_size": 1024, "num_heads": 8})
    size = model(shape=shape).size
    least = least_arena_nbytes(size, keep_grads=keep_grads, num_optimizers=2)

    def plan(nbytes: int) -> None:
        make_plan(size, num_optimizers=2, grad_itemsize=2, keep_grads=keep_grads, host_memory_nbytes=nbytes)

    plan(least)
    with pytest.raises(PlanError):
        plan(least - 2**20)


def test_every_memory_can_be_too_small() -> None:
    bare = model()
    whole, pieces = (device_memory(bare, streams_layers=streams, num_grad_buffers=1).total for streams in (False, True))
    assert pieces < whole
    enough = {"device_nbytes": pieces, "host_nbytes": GIB, "ssd_nbytes": GIB}
    assert fits(bare, keep_grads=False, num_optimizers=1, **enough)
    for key, nbytes in {"device_nbytes": pieces - 1, "host_nbytes": 2**16, "ssd_nbytes": 2**16}.items():
        assert not fits(bare, keep_grads=False, num_optimizers=1, **(enough | {key: nbytes}))
    assert not fits(bare, keep_grads=False, num_optimizers=1, num_grad_buffers=2, **enough)
