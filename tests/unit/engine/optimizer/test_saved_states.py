"""Saved states give back the stored ones in every format, and states that are not given stay."""

import pytest
import torch

from windlass.engine.device.dtypes import state_dtype
from windlass.engine.optimizer.saved_states import MOMENTS, from_saved, saved_dtype, to_saved, weight_kind
from windlass.storage.ids import ALL_FORMATS, Formats, StateKind, StatePrecision

NUMEL = 1000


def stored(formats: Formats, seed: int) -> dict[StateKind, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = {kind: torch.zeros(NUMEL, dtype=state_dtype(formats, kind)) for kind in formats.itemsizes}
    saved = {kind: torch.rand(NUMEL, generator=generator) for kind in (weight_kind(formats), *MOMENTS)}
    from_saved(formats, states, saved)
    return states


@pytest.mark.parametrize("formats", ALL_FORMATS, ids=str)
def test_states_that_are_saved_and_loaded_have_same_bits(formats: Formats) -> None:
    states, target = stored(formats, 1), stored(formats, 2)
    saved = to_saved(formats, states)
    assert {state.dtype for state in saved.values()} == {saved_dtype(formats)}
    from_saved(formats, target, saved)
    for kind, state in states.items():
        assert torch.equal(target[kind].view(torch.int8), state.view(torch.int8)), kind


@pytest.mark.parametrize("formats", ALL_FORMATS, ids=str)
def test_states_that_are_not_given_stay(formats: Formats) -> None:
    states = stored(formats, 1)
    before = {kind: state.clone() for kind, state in to_saved(formats, states).items()}
    moments = {kind: torch.zeros(NUMEL) for kind in MOMENTS}
    from_saved(formats, states, moments)
    after = to_saved(formats, states)
    assert torch.equal(after[weight_kind(formats)], before[weight_kind(formats)])
    assert all(not after[kind].any() for kind in MOMENTS)


def test_fp32_and_split_states_are_saved_alike() -> None:
    split, fp32 = (Formats(ALL_FORMATS[2].precision, states) for states in (StatePrecision.SPLIT, StatePrecision.FP32))
    saved = to_saved(split, stored(split, 1))
    target = stored(fp32, 2)
    from_saved(fp32, target, saved)
    assert all(torch.equal(to_saved(fp32, target)[kind], state) for kind, state in saved.items())
    assert torch.equal(target[StateKind.PARAM], target[StateKind.MASTER].bfloat16())
