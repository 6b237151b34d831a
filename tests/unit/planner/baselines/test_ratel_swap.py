"""Ratel's Algorithm 1, compared with trying every amount."""

from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.planner.baselines.ratel_swap import (
    Candidate,
    Case,
    best_swap,
    by_benefit,
    candidates_of,
    recomputed_flops,
)
from windlass.planner.cost.model_profile import BlockProfile, LayerProfile, ModelProfile, OperatorProfile, shared_of

CANDIDATES = [Candidate(nbytes=4, num_flops=4), Candidate(nbytes=2, num_flops=8), Candidate(nbytes=3, num_flops=0)]

candidates = st.lists(
    st.builds(Candidate, nbytes=st.integers(1, 1000), num_flops=st.integers(0, 10**6)), min_size=1, max_size=12
)
rates = st.floats(1e-3, 1e3)


def step(compute: float, link: float, fixed_s: float) -> Callable[[int, int], float]:
    """Two stages as in Ratel's equations 2 and 5: out beside a fixed compute, back beside compute and other traffic."""

    def iteration_s(nbytes: int, num_flops: int) -> float:
        return max(fixed_s, nbytes / link) + max(2 * fixed_s + num_flops / compute, (nbytes + 500) / link)

    return iteration_s


@settings(deadline=None)
@given(found=candidates, least=st.integers(0, 500), compute=rates, link=rates, fixed_s=st.floats(0, 1e5))
def test_no_other_amount_is_faster(
    found: list[Candidate], least: int, compute: float, link: float, fixed_s: float
) -> None:
    iteration_s = step(compute, link, fixed_s)
    best = best_swap(found, iteration_s, least_nbytes=least)
    assert best.num_flops == recomputed_flops(found, best.nbytes - least)
    total = sum(each.nbytes for each in found)
    in_full = [0, *accumulate(each.nbytes for each in by_benefit(found))]
    every = [iteration_s(least + nbytes, recomputed_flops(found, nbytes)) for nbytes in in_full]
    assert best.iteration_s == min(every)
    assert best.nbytes - least == in_full[every.index(min(every))]
    # An amount that cuts a layer in two is between its neighbours, or the best amount is one of them: convexity.
    position = in_full.index(best.nbytes - least)
    low, high = in_full[max(0, position - 1)], in_full[min(len(in_full) - 1, position + 1)]
    grid = [total * part // 64 for part in range(65)]
    outside = [nbytes for nbytes in grid if nbytes <= low or nbytes >= high]
    slack = 1e-6 * best.iteration_s + 1 / compute  # operations are whole numbers
    for nbytes in outside:
        assert iteration_s(least + nbytes, recomputed_flops(found, nbytes)) >= best.iteration_s - slack


@settings(deadline=None)
@given(found=candidates, compute=rates, most=st.integers(0, 5000))
def test_no_more_is_swapped_than_there_is_room_for(found: list[Candidate], compute: float, most: int) -> None:
    best = best_swap(found, step(compute, 1e9, 0), most_nbytes=most)
    assert best.nbytes <= most


def test_layers_that_spare_most_operations_a_byte_go_first() -> None:
    assert by_benefit(CANDIDATES) == [CANDIDATES[1], CANDIDATES[0], CANDIDATES[2]]
    assert [recomputed_flops(CANDIDATES, nbytes) for nbytes in (0, 1, 2, 4, 6, 9, 10)] == [12, 8, 4, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("link", "compute", "case", "nbytes"),
    [
        (1e-3, 1e3, Case.LEAST, 1),  # links are slow
        (1e6, 1e-3, Case.ALL, 7),  # compute is slow; operators without operations stay
        (503.0, 4.0, Case.BETWEEN, 3),  # the first candidate pays, the second does not
    ],
)
def test_best_swap_finds_each_of_the_three_cases(link: float, compute: float, case: Case, nbytes: int) -> None:
    best = best_swap(CANDIDATES, step(compute, link, 0), least_nbytes=1)
    assert (best.case, best.nbytes) == (case, nbytes)


def test_operator_that_saves_nothing_is_added_to_the_next() -> None:
    operators = [("product", 8, 5, False), ("norm", 4, 1, True), ("look", 0, 2, True), ("last", 2, 0, True)]
    layer = LayerProfile(
        numel=1,
        num_flops=8,
        input_nbytes=3,
        operators=tuple(
            OperatorProfile(name=name, outputs_nbytes=(nbytes,), num_flops=num_flops, is_saved=is_saved, reads=())
            for name, nbytes, num_flops, is_saved in operators
        ),
    )
    end = BlockProfile(numel=1, num_flops=0)
    profile = ModelProfile(
        name="",
        num_examples=1,
        num_tokens=1,
        embedding=end,
        layers=(layer,) * 2,
        head=end,
        shared=shared_of(2, is_tied=False),
        chunk_numel=1,
    )
    assert candidates_of(profile) == [Candidate(nbytes=4, num_flops=6), Candidate(nbytes=2, num_flops=2)] * 2
