"""Programs solved in parts, compared with an exhaustive search, or with that of HiGHS."""

import math
import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.support.examples import examples
from tests.support.planner.programs import beside_the_best, best_of_all, fits, options, programs
from windlass.planner.solver.program import decomposition, solve_in_parts
from windlass.planner.solver.program.integer_program import (
    Assignment,
    BlockGroup,
    Bound,
    Option,
    Overflow,
    Program,
    outcome_of,
    solve,
)

# A group with more options than are listed. They use one buffer and few bytes.
MANY = st.builds(
    lambda count, its_options: BlockGroup(count=count, options=tuple(its_options)),
    st.integers(1, 2),
    st.lists(options(st.integers(0, 30).map(lambda number: number * 1e8), num_buffers=1), min_size=7, max_size=7),
)


def without_movable_bytes(program: Program) -> Program:
    """Returns the program with such groups of few options that their counts can be listed."""
    *few, many = program.blocks
    fixed = (
        replace(group, options=tuple(replace(option, movable_nbytes=0.0) for option in group.options)) for group in few
    )
    return replace(program, blocks=(*fixed, many))


PROGRAMS = programs(MANY, most_groups=2) | programs(MANY, most_groups=2).map(without_movable_bytes).map(
    lambda program: replace(program, limits=tuple(5e9 + 3 * limit for limit in program.limits))
)
# Fractions of groups with many options are rounded without a proof. With so few blocks a worse one costs much.
ROUNDING = 0.05
# The same for tens of blocks, with the gaps of both solutions.
NEAR = 1e-3


@settings(max_examples=examples(100), deadline=None)
@given(PROGRAMS)
def test_solve_in_parts_fits_and_is_nearly_the_best(program: Program) -> None:
    assert_nearly_best(program)


@pytest.mark.long
@settings(max_examples=examples(1000), deadline=None)
@given(PROGRAMS)
def test_solve_in_parts_a_thousand_times_is_nearly_the_best(program: Program) -> None:
    assert_nearly_best(program)


def assert_nearly_best(program: Program) -> None:
    compared = beside_the_best(program, solve_in_parts(program))
    if compared is not None:
        best, outcome = compared
        assert best.cost * (1 - 1e-6) - 1e-6 <= outcome.cost <= best.cost * (1 + ROUNDING) + 1e-6


def test_solve_in_parts_again_with_less_memory_uses_what_is_known_and_fits() -> None:
    """The second program has the options of the first, whose best assignment no longer fits."""
    program = layered(device_nbytes=30.0)
    assert solve_in_parts(program) == Assignment(counts=((4, 0), (0, 0, 0, 0, 0, 0, 4)), moved_nbytes=0.0)
    less = replace(program, limits=(17.0,))
    found = solve_in_parts(less)
    assert found is not None
    outcome = outcome_of(less, found)
    assert outcome.nbytes[0] <= 17.0
    assert solve_in_parts(less, below=outcome.cost * (1 - 1e-3)) is None
    assert solve_in_parts(replace(program, nbytes=(1.0,), limits=(0.5,))) is None


def test_solve_in_parts_with_less_to_store_or_a_lower_limit_searches_no_second_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search of the tree that finds nothing proves it for all programs that can do no more."""
    searched, program = searches_trees(monkeypatch), with_half_a_room()
    best = solve_in_parts(program)
    assert best is not None
    assert len(searched) == 1  # and nothing better was found
    below = outcome_of(program, best).cost * (1 - 1e-4)
    assert solve_in_parts(program, below=below) is None
    assert solve_in_parts(replace(program, nbytes=(0.0, 2.0)), below=below) is None  # of an ample tier
    assert solve_in_parts(replace(program, limits=(16.5, 100.0)), below=below) is None
    assert len(searched) == 1
    assert solve_in_parts(replace(program, limits=(18.0, 100.0)), below=below) is not None


@pytest.mark.parametrize("move_s", [10.0, 3.75])
@pytest.mark.parametrize("below", [math.inf, 29.4])
def test_tree_with_more_of_an_ample_tier_gives_no_plan_that_moves_more_for_it(
    move_s: float, below: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more bytes of the last tier, an assignment costs 28 that moves some of them without."""
    searched = searches_trees(monkeypatch)
    states = tuple(Option(seconds=(seconds,), nbytes=(0.0, 0.0, 0.0)) for seconds in (1.0, 2.0))
    # The first tier has room for eight, and half of one more: for all of one block, and part of another.
    ample = {1: 9.0, 2: 10.4}
    kept = tuple(
        Option(
            seconds=(8.0 - number,),
            nbytes=(2.0 * number, 0.0, each := 30.0 * (0 < number < 6) if number not in ample else ample[number]),
            movable_nbytes=each if number in ample else 0.0,
        )
        for number in range(7)
    )
    program = Program(
        blocks=(BlockGroup(count=4, options=states), BlockGroup(count=4, options=kept)),
        seconds=(0.0,),
        nbytes=(0.0, 0.0, 0.0),
        limits=(17.0, 100.0, 10.0),
        bounds=(Bound(weights=(1.0,)),),
        overflow=Overflow(source=2, target=1, seconds=(move_s,)),
    )
    found = solve_in_parts(program, below=below)
    assert searched
    assert found is not None
    assert found.moved_nbytes == 0
    assert outcome_of(program, found).step_s == pytest.approx(29.0)


def test_solve_in_parts_with_a_smaller_gap_searches_a_tree_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wide gap, the search of a tree may find nothing below a limit where some assignments cost less."""
    searched, program = searches_trees(monkeypatch), with_half_a_room()
    best = solve(program)
    assert best is not None
    below = outcome_of(program, best).cost * (1 - 6e-3)
    assert solve_in_parts(program, gap=5e-3, below=below) is None
    num_searched = len(searched)
    again = replace(program, limits=(17.0, 99.0))
    assert solve_in_parts(again, gap=5e-3, below=below) is None
    assert len(searched) == num_searched
    assert solve_in_parts(again, gap=2e-4, below=below) is None
    assert len(searched) == num_searched + 1
    assert solve_in_parts(again, gap=5e-3, below=below) is None
    assert len(searched) == num_searched + 1


def with_half_a_room() -> Program:
    """Returns a program with room for eight, and half of one more."""
    states = tuple(Option(seconds=(seconds,), nbytes=(0.0, 1.0)) for seconds in (1.0, 2.0))
    kept = tuple(Option(seconds=(8.0 - number,), nbytes=(2.0 * number, 1.0)) for number in range(7))
    return Program(
        blocks=(BlockGroup(count=4, options=states), BlockGroup(count=4, options=kept)),
        seconds=(0.0,),
        nbytes=(0.0, 4.0),
        limits=(17.0, 100.0),
        bounds=(Bound(weights=(1.0,)),),
    )


@settings(max_examples=examples(50), deadline=None)
@given(PROGRAMS, st.lists(st.tuples(*(st.sampled_from([0.9, 0.99, 1.0, 1.02, 1.2]),) * 4), min_size=1, max_size=6))
def test_proofs_of_programs_exclude_nothing_that_costs_less(
    program: Program, changes: list[tuple[float, float, float, float]]
) -> None:
    """Programs with the same options, and other limits, buffers, bounds and costs to beat."""
    first = best_of_all(program)
    with pytest.MonkeyPatch.context() as monkeypatch:
        searches_trees(monkeypatch)
        for of_limits, of_buffers, of_bounds, of_cost in changes if first is not None else ():
            changed = replace(
                program,
                limits=tuple(of_limits * limit for limit in program.limits),
                buffers=tuple(replace(each, most_nbytes=of_buffers * each.most_nbytes) for each in program.buffers),
                bounds=tuple(replace(each, constant_s=of_bounds * each.constant_s) for each in program.bounds),
            )
            assert first is not None
            below = of_cost * first.cost
            best, found = best_of_all(changed), solve_in_parts(changed, below=below)
            if found is not None:
                assert outcome_of(changed, found).cost < below
            else:
                assert best is None or best.cost >= below * (1 - 1e-5) - 1e-6


def searches_trees(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Lets each program be solved by its tree, as if its lists were too long. Returns those that are."""
    searched = []

    def searching(program: Program, *, gap: float, below: float) -> Assignment | None:
        searched.append(program)
        return solve(program, gap=gap, below=below)

    monkeypatch.setattr(decomposition, "solve", searching)
    for name in ("_MOST_LISTED", "_MOST_LISTED_BLINDLY"):
        monkeypatch.setattr(decomposition, name, 0)
    return searched


def layered(*, device_nbytes: float) -> Program:
    """Four layers: states on the device are faster, and so are activations that are kept."""
    states = (Option(seconds=(1.0, 0.0), nbytes=(1.0,)), Option(seconds=(2.0, 0.0), nbytes=(0.0,)))
    kept = tuple(Option(seconds=(0.0, 8.0 - number), nbytes=(float(number),)) for number in range(7))
    return Program(
        blocks=(BlockGroup(count=4, options=states), BlockGroup(count=4, options=kept)),
        seconds=(0.0, 0.0),
        nbytes=(0.0,),
        limits=(device_nbytes,),
        bounds=(Bound(weights=(1.0, 1.0)),),
    )


@pytest.mark.parametrize(
    "num_programs", [pytest.param(30, id="few"), pytest.param(300, id="many", marks=pytest.mark.long)]
)
def test_solve_in_parts_of_tens_of_blocks_is_as_good_as_a_search_of_the_tree(num_programs: int) -> None:
    """Rounding alone costs up to a percent more, and finds nothing below some limits that the tree meets."""
    numbers = random.Random(5)
    for _ in range(num_programs):
        program = of_tens_of_blocks(numbers)
        of_tree, found = solve(program, gap=2e-4), solve_in_parts(program, gap=2e-4)
        assert (of_tree is None) == (found is None)
        if of_tree is None or found is None:
            continue
        cost = outcome_of(program, of_tree).cost
        assert outcome_of(program, found).cost <= (1 + NEAR) * cost
        # New groups, of which nothing is known yet.
        again = replace(program, blocks=tuple(replace(group) for group in program.blocks))
        assert solve_in_parts(again, gap=2e-4, below=numbers.uniform(1 + NEAR, 1.01) * cost) is not None


def of_tens_of_blocks(numbers: random.Random) -> Program:
    """Returns a program like that of a job: few options for states, many for activations."""
    count = numbers.choice((16, 32, 48, 80))
    moves = numbers.random() < 0.5  # whether bytes of states may move, too
    states = tuple(
        Option(seconds=seconds, nbytes=nbytes, movable_nbytes=nbytes[0] if moves else 0.0)
        for seconds, nbytes in (
            ((1.0, 0.2), (0.0, 0.0)),
            ((0.6, 0.2), (0.0, 1.0)),
            ((0.3, 0.1), (0.0, 6.0)),
            ((0.1, 0.3), (2.0, 0.0)),
        )
    )
    sizes = sorted(numbers.random() * 1.5 for _ in range(8))
    activations = (
        *(
            Option(seconds=(0.0, 1.2 - 0.12 * number - 0.02 * numbers.random()), nbytes=(size, 0.0))
            for number, size in enumerate(sizes)
        ),
        *(
            Option(seconds=(0.05 * number, 1.2 - 0.12 * number), nbytes=(0.05, size))
            for number, size in enumerate(sizes)
        ),
    )
    return Program(
        blocks=(
            BlockGroup(count=count, options=states),
            BlockGroup(count=1, options=states[:2]),
            BlockGroup(count=count, options=activations),
        ),
        seconds=(0.0, 0.0),
        nbytes=(0.0, 0.0),
        limits=(count * numbers.uniform(0.02, 1.5), count * numbers.uniform(0.5, 6)),
        bounds=(Bound(weights=(1.0, 0.5)), Bound(weights=(0.3, 1.0)), Bound(weights=(0.0, 1.1))),
        overflow=Overflow(source=0, target=1, seconds=(0.05, 0.0)) if moves else None,
    )


@pytest.mark.parametrize("limit", [520.0, 1000.0])
def test_solve_in_parts_of_a_program_that_just_fits_finds_an_assignment(limit: float) -> None:
    """Missing bytes cost less than the options that need none, because these are a small share of the limit."""
    size = 0.003 * limit / 16
    many = tuple(Option(seconds=(1 - 0.15 * number,), nbytes=(size * number / 6,)) for number in range(7))
    program = Program(
        blocks=(
            BlockGroup(count=1, options=(Option(seconds=(1.0,), nbytes=(0.0,)),)),
            BlockGroup(count=20, options=many),
        ),
        seconds=(0.0,),
        nbytes=(limit * (1 - 0.003),),
        limits=(limit,),
        bounds=(Bound(weights=(1.0,)),),
    )
    found = solve_in_parts(program)
    assert found is not None
    assert fits(program, outcome_of(program, found))
    assert solve_in_parts(replace(program, nbytes=(limit * (1 + 1e-6),))) is None
