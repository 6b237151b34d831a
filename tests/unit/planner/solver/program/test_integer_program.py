"""The integer program, compared with an exhaustive search."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.examples import examples
from tests.support.planner.programs import beside_the_best, programs
from windlass.planner.solver.program import integer_program
from windlass.planner.solver.program.highs import Assigned, SolverError
from windlass.planner.solver.program.integer_program import (
    SPARE_WEIGHT,
    Assignment,
    BlockGroup,
    Bound,
    Buffer,
    Option,
    Outcome,
    Program,
    least_assignment,
    outcome_of,
    shortfall,
    solve,
)

PROGRAMS = programs()


@settings(max_examples=examples(300), deadline=None)
@given(PROGRAMS)
def test_equals_a_search_through_everything(program: Program) -> None:
    assert_best(program)


@pytest.mark.long
@settings(max_examples=examples(5000), deadline=None)
@given(PROGRAMS)
def test_equals_exhaustive_search_thousands_of_times(program: Program) -> None:
    assert_best(program)


@pytest.mark.long
@settings(max_examples=examples(300), deadline=None)
@given(PROGRAMS)
def test_slow_proof_ends_within_a_thousandth(program: Program) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("windlass.planner.solver.program.integer_program._MAX_NODES", 0)
        assert_best(program, rel=1e-3)


def assert_best(program: Program, rel: float = 2e-6) -> None:
    compared = beside_the_best(program, solve(program))
    if compared is not None:
        best, outcome = compared
        assert outcome.cost == pytest.approx(best.cost, rel=rel, abs=1e-6)


@settings(max_examples=examples(100), deadline=None)
@given(PROGRAMS)
def test_with_what_is_missing_it_fits(program: Program) -> None:
    missing = shortfall(program)
    assert (max(missing) < 1e3) == (solve(program) is not None)
    limits = tuple(limit + lacks + 1e5 for limit, lacks in zip(program.limits, missing, strict=True))
    raised = replace(program, limits=limits)
    assert solve(raised) is not None


@pytest.mark.long
@settings(max_examples=examples(200), deadline=None)
@given(PROGRAMS)
def test_with_what_one_tier_lacks_it_fits_or_that_does_not_help(program: Program) -> None:
    for tier, limit in enumerate(program.limits):
        least = least_assignment(program, tier, elastic=(tier,))
        lacks = None if least is None else max(0.0, outcome_of(program, least).nbytes[tier] - limit)
        all_nbytes = sum(
            group.count * max(map(sum, (option.nbytes for option in group.options))) for group in program.blocks
        )
        all_nbytes += sum(buffer.most_nbytes for buffer in program.buffers)
        more = (sum(program.nbytes) + all_nbytes if lacks is None else lacks) + 1e5
        limits = (*program.limits[:tier], limit + more, *program.limits[tier + 1 :])
        raised = replace(program, limits=limits)
        assert (lacks is None) == (solve(raised) is None)


def test_the_step_is_the_largest_bound() -> None:
    program = Program(
        blocks=(
            BlockGroup(
                count=2, options=(Option(seconds=(1.0, 2.0), nbytes=(5.0,)), Option(seconds=(3.0, 0.0), nbytes=(0.0,)))
            ),
        ),
        seconds=(0.5, 0.0),
        nbytes=(0.0,),
        limits=(5.0,),
        bounds=(Bound(weights=(1.0, 0.0)), Bound(weights=(0.0, 1.0), constant_s=1.0)),
    )
    found = solve(program)
    assert found == Assignment(counts=((1, 1),), moved_nbytes=0.0)
    outcome = outcome_of(program, found)
    assert outcome == Outcome(step_s=4.5, seconds=(4.5, 2.0), nbytes=(5.0,), cost=4.5 + 6.5 * SPARE_WEIGHT)


def test_rare_bound_limits_the_step_and_its_part_counts_nowhere_else() -> None:
    """The second option moves more through a resource that no other bound counts."""

    def program(rate: float) -> Program:
        return Program(
            blocks=(
                BlockGroup(
                    count=1,
                    options=(
                        Option(seconds=(2.0, 1.0 / rate), nbytes=(0.0,)),
                        Option(seconds=(1.0, 3.0 / rate), nbytes=(0.0,)),
                    ),
                ),
            ),
            seconds=(0.0, 0.0),
            nbytes=(0.0,),
            limits=(1.0,),
            bounds=(Bound(weights=(1.0, 0.0)), Bound(weights=(0.0, 1.0), is_rare=True)),
            uncounted_parts=(1,),
        )

    for rate, expected, step_s, counted_s in ((10.0, (0, 1), 1.0, 1.0), (1.0, (1, 0), 2.0, 2.0)):
        found = solve(program(rate))
        assert found is not None
        assert found.counts == (expected,)
        outcome = outcome_of(program(rate), found)
        assert (outcome.step_s, outcome.cost) == (step_s, step_s + SPARE_WEIGHT * counted_s)


def test_a_buffer_takes_what_goes_there_until_it_is_full() -> None:
    """Two blocks through the buffer are faster than resident ones.

    One alone is not, because the buffer is too large for it.
    """
    rests = Option(seconds=(1.0,), nbytes=(4.0,))
    passes = Option(seconds=(0.0,), nbytes=(0.0,), buffered_nbytes=(5.0,))
    program = Program(
        blocks=(BlockGroup(count=3, options=(rests, passes, Option(seconds=(9.0,), nbytes=(0.0,)))),),
        seconds=(0.0,),
        nbytes=(1.0,),
        limits=(7.0,),
        bounds=(Bound(weights=(1.0,)),),
        buffers=(Buffer(tier=0, most_nbytes=6.0),),
    )
    found = solve(program)
    assert found == Assignment(counts=((0, 3, 0),), moved_nbytes=0.0)
    assert outcome_of(program, found).nbytes == (7.0,)
    found = solve(replace(program, limits=(6.5,)))
    assert found == Assignment(counts=((0, 1, 2),), moved_nbytes=0.0)
    assert outcome_of(program, found).nbytes == (6.0,)
    assert shortfall(replace(program, limits=(0.0,))) == pytest.approx((1.0,))


CHOICE = Program(
    blocks=(
        BlockGroup(count=1, options=(Option(seconds=(1.0,), nbytes=(0.0,)), Option(seconds=(2.0,), nbytes=(0.0,)))),
    ),
    seconds=(0.0,),
    nbytes=(0.0,),
    limits=(1.0,),
    bounds=(Bound(weights=(1.0,)),),
)


def cut_short(*columns: float, value: float = math.inf) -> Assigned:
    gap = 0.5 if columns else math.inf
    return Assigned(columns=np.array([*columns, *[0.0] * 3]), value=value, gap=gap, is_cut_short=True)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([cut_short(1, 0, value=1.0), cut_short(0, 1, value=2.0)], (1, 0)),
        ([cut_short(1, 0, value=1.0), cut_short()], (1, 0)),
        ([cut_short(1, 0, value=1.0), None], (1, 0)),
        ([cut_short(0, 1, value=2.0), cut_short(1, 0, value=1.0)], (1, 0)),
        ([cut_short(), cut_short(0, 1, value=2.0)], (0, 1)),
        ([cut_short(), None], None),
        ([None], None),
    ],
)
def test_solve_of_a_hard_program_keeps_the_better_of_two_results_with_so_many_nodes(
    results: list[Assigned | None], expected: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, nodes = iter(results), []

    def minimize_whole(*_: object, gap: float, max_nodes: int) -> Assigned | None:
        nodes.append(max_nodes)
        return next(given)

    monkeypatch.setattr(integer_program, "minimize_whole", minimize_whole)
    found = solve(CHOICE)
    assert (None if found is None else found.counts) == (None if expected is None else (expected,))
    assert nodes == [150, 3000][: len(results)]


def test_solve_without_assignment_and_without_proof_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_program, "minimize_whole", lambda *_, **__: cut_short())
    with pytest.raises(SolverError, match="found no assignment in 3000 nodes"):
        solve(CHOICE)


@pytest.mark.long
def test_search_ends_for_a_program_after_which_highs_restarted_without_end() -> None:
    """A plan for which HiGHS 1.16 did not end. In a process of its own, because no Python code can end HiGHS."""
    machine = ("--hardware", "rtx4090:ram=128,ssds=3", "--batch-size", "16", "--seq-len", "1024", "--json")
    command = [
        sys.executable,
        "-c",
        "from windlass.service.cli import main; main()",
        "plan",
        "--model",
        "llama-3.1-8b",
        *machine,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
