"""Device memory at each moment of a step, added up by hand."""

from dataclasses import replace

from windlass.engine.memory_plan.device_moments import (
    Moment,
    MomentNeed,
    Pass,
    UnitNeed,
    evaluation_moments,
    leaving_limit,
    step_moments,
)

EMBEDDING = UnitNeed(output_nbytes=10, held_nbytes=1, swapped=(), forward_peak_nbytes=100, backward_peak_nbytes=200)
LAYER = UnitNeed(output_nbytes=10, held_nbytes=7, swapped=(3, 4), forward_peak_nbytes=300, backward_peak_nbytes=400)
SMALL = UnitNeed(output_nbytes=5, held_nbytes=2, swapped=(1,), forward_peak_nbytes=30, backward_peak_nbytes=40)
SMALL_EMBEDDING = replace(EMBEDDING, output_nbytes=5)
# Two layers; two micro-batches, the second smaller.
UNITS = ((EMBEDDING, SMALL_EMBEDDING), (LAYER, SMALL), (LAYER, SMALL))
F, H, B = Pass.FORWARD, Pass.HEAD, Pass.BACKWARD


def test_each_moment_of_a_step() -> None:
    found = [
        (moment.direction, moment.block, moment.microbatch, need.held_nbytes, need.hidden_nbytes)
        for moment, need in step_moments(UNITS, (500, 50), leaving_nbytes=10)
    ]
    assert found == [
        (F, 0, 0, 0, 0),
        (F, 0, 1, 1, 10),
        (F, 1, 0, 2, 15),
        (F, 1, 1, 9, 15),
        (F, 2, 0, 11, 15),
        (F, 2, 1, 18, 15),
        (H, 3, 0, 20, 15),
        (H, 3, 1, 20, 15),
        (B, 2, 0, 20, 15),
        (B, 2, 1, 13, 15),
        (B, 1, 0, 11, 15),
        (B, 1, 1, 4, 15),
        # The tensors from the embedding's forward pass stay until the end.
        (B, 0, 0, 2, 15),
        (B, 0, 1, 2, 5),
    ]


def test_the_next_unit_comes_back_while_one_is_gone_through() -> None:
    moments = dict(step_moments(UNITS, (500, 50), leaving_nbytes=10))
    returning = [need.returning_nbytes for moment, need in moments.items() if moment.direction is not F]
    # During the head, the last layer's first micro-batch; then the current unit and the next one.
    assert returning == [7, 7, 7 + 1, 1 + 7, 7 + 1, 1, 0, 0]
    assert {need.returning_nbytes for moment, need in moments.items() if moment.direction is F} == {0}


def test_swapped_tensors_count_while_they_are_copied_out() -> None:
    leaving = [need.leaving_nbytes for _, need in step_moments(UNITS, (500, 50), leaving_nbytes=10)]
    assert leaving == [0, 0, 7, 8, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    # A tensor that is larger than the limit is allowed alone.
    huge = replace(LAYER, swapped=(50, 3))
    assert leaving_limit([[EMBEDDING], [huge]], 10, has_ssd_store=False) == 50
    # Two stores with half of the space each; the one for the SSDs releases whole tensors.
    assert leaving_limit([[EMBEDDING], [LAYER]], 10, has_ssd_store=True) == 5 + 5 + 4
    assert leaving_limit([[EMBEDDING], [huge]], 10, has_ssd_store=True) == 50 + 50 + 50


def test_moment_adds_up_all_kinds_of_memory() -> None:
    need = MomentNeed(
        held_nbytes=1, hidden_nbytes=20, returning_nbytes=300, leaving_nbytes=4000, operation_nbytes=50000
    )
    assert need.nbytes == 54321
    moments = dict(step_moments(UNITS, (500, 50), leaving_nbytes=10))
    assert moments[Moment(direction=H, block=3, microbatch=0)].operation_nbytes == 500
    assert moments[Moment(direction=B, block=1, microbatch=1)].operation_nbytes == 40


def test_an_evaluation_holds_what_enters_and_what_leaves_a_layer() -> None:
    evaluated = [[replace(unit, held_nbytes=0, swapped=()) for unit in row] for row in UNITS[1:]]
    found = [
        (moment.block, moment.microbatch, need.held_nbytes, need.hidden_nbytes, need.operation_nbytes)
        for moment, need in evaluation_moments([UNITS[0], *evaluated], (500, 50))
    ]
    assert found == [
        (0, 0, 0, 0, 100),
        (0, 1, 1, 10, 100),
        (1, 0, 2, 15, 300),
        (1, 1, 2, 25, 30),
        (2, 0, 2, 15, 300),
        (2, 1, 2, 25, 30),
        (3, 0, 2, 15, 500),
        (3, 1, 2, 5, 50),
    ]
