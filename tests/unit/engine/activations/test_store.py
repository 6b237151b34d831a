import pytest

from windlass.engine.memory_plan.activation_policy import RECOMPUTE_ALL, BlockActivations, Place

MM, ADD = "aten.mm.default", "aten.add.Tensor"


def test_by_default_only_the_input_is_kept() -> None:
    assert RECOMPUTE_ALL.place_of(MM, 0) is Place.NOWHERE
    assert not RECOMPUTE_ALL.swaps
    assert not RECOMPUTE_ALL.needs_grad


def test_a_call_precedes_its_operator_and_an_operator_all() -> None:
    policy = BlockActivations(kept=frozenset({MM, "*"}), swapped=frozenset({f"{MM}#1", ADD}))
    assert [policy.place_of(MM, call) for call in range(3)] == [Place.KEPT, Place.SWAPPED, Place.KEPT]
    assert policy.place_of(ADD, 0) is Place.SWAPPED
    assert policy.place_of("aten.bmm.default", 0) is Place.KEPT
    assert policy.swaps
    assert policy.needs_grad


def test_without_recompute_what_is_not_swapped_is_kept() -> None:
    policy = BlockActivations(recompute=False, swapped=frozenset({MM}))
    assert policy.place_of(MM, 4) is Place.SWAPPED
    assert policy.place_of(ADD, 0) is Place.KEPT
    assert policy.needs_grad


def test_swapping_the_input_alone_computes_as_before() -> None:
    policy = BlockActivations(swap_input=True)
    assert policy.swaps
    assert not policy.needs_grad


def test_a_choice_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['aten.mm.default'\] are to be kept and to be swapped; choose one"):
        BlockActivations(kept=frozenset({MM, ADD}), swapped=frozenset({MM}))
    with pytest.raises(ValueError, match="leave `kept` empty"):
        BlockActivations(recompute=False, kept=frozenset({MM}))
