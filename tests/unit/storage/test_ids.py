import itertools

import pytest

from windlass.storage.ids import ALL_FORMATS, Formats, Precision, StateKind, StatePrecision


def test_pairs_that_do_not_exist_are_refused() -> None:
    for precision, states in itertools.product(Precision, StatePrecision):
        if precision is Precision.BF16 or states is StatePrecision.FP32:
            assert Formats(precision, states) in ALL_FORMATS
        else:
            with pytest.raises(ValueError, match=f"{states} states go with bf16 training; in {precision} states are"):
                Formats(precision, states)
    assert len(set(ALL_FORMATS)) == len(ALL_FORMATS) == 5


@pytest.mark.parametrize(
    ("precision", "states", "nbytes"),
    [
        (Precision.FP32, StatePrecision.FP32, 12),
        (Precision.FP16, StatePrecision.FP32, 14),
        (Precision.BF16, StatePrecision.FP32, 14),
        (Precision.BF16, StatePrecision.SPLIT, 12),
        (Precision.BF16, StatePrecision.BF16, 6),
    ],
)
def test_bytes_of_an_element_at_rest(precision: Precision, states: StatePrecision, nbytes: int) -> None:
    assert sum(Formats(precision, states).itemsizes.values()) == nbytes


@pytest.mark.parametrize("formats", ALL_FORMATS)
def test_the_forward_pass_reads_a_state_of_the_models_precision(formats: Formats) -> None:
    assert formats.itemsizes[formats.param_kind] == (4 if formats.precision is Precision.FP32 else 2)
    # States that contain the fp32 master or, with bf16 states, the master itself.
    holds_master = {StateKind.MASTER, StateKind.RESIDUAL} & formats.itemsizes.keys()
    assert len(holds_master) == (0 if formats.states is StatePrecision.BF16 else 1)
    assert {StateKind.EXP_AVG, StateKind.EXP_AVG_SQ} < formats.itemsizes.keys()
