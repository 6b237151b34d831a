"""The order of jobs: decisions for small machines, by hand and at random."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from windlass.service.dispatcher.placement.queue_policy import (
    Amounts,
    Decision,
    Holder,
    Queued,
    Turn,
    decide,
    in_turn,
    missing,
    total,
)

BOX = {"devices": 2, "memory": 10}


def takes(memory: int, devices: int = 1) -> Amounts:
    return {"devices": devices, "memory": memory}


def running(job_id: str, memory: int, *, priority: int = 0, may_leave_now: bool = True) -> Holder:
    return Holder(
        job_id=job_id, takes=takes(memory), priority=priority, may_be_paused=True, may_leave_now=may_leave_now
    )


def waiting(job_id: str, memory: int, *, priority: int = 0, is_ready: bool = True) -> Queued:
    return Queued(job_id=job_id, needs=takes(memory), priority=priority, is_ready=is_ready)


def decided(holders: list[Holder], queued: list[Queued], box: Amounts = BOX) -> Mapping[str, Decision]:
    return {decision.job_id: decision for decision in decide(box, holders, queued)}


def begun(holders: list[Holder], queued: list[Queued], box: Amounts = BOX) -> list[str]:
    return [job_id for job_id, decision in decided(holders, queued, box).items() if decision.begins]


def test_jobs_begin_in_order_while_they_fit() -> None:
    assert begun([], [waiting("a", 4), waiting("b", 6), waiting("c", 0)]) == ["a", "b"]
    assert begun([], [waiting("a", 4), waiting("b", 7)]) == ["a"]


def test_what_is_missing_is_told_by_resource() -> None:
    found = decided([running("r", 6), running("s", 1)], [waiting("a", 5)])["a"]
    assert found.missing == {"devices": 1, "memory": 2}
    assert not found.never


def test_unknown_resource_is_not_limited() -> None:
    assert begun([running("r", 100)], [waiting("a", 100)], {"devices": 2}) == ["a"]


def test_a_box_that_has_less_than_is_taken_lets_begin_what_needs_none_of_it() -> None:
    assert begun([running("r", 20)], [waiting("a", 0)]) == ["a"]
    assert begun([running("r", 20)], [waiting("a", 1)]) == []


def test_a_job_behind_one_that_waits_begins_only_where_that_one_does_not_wait_longer() -> None:
    # When "r" has ended there is space for both...
    assert begun([running("r", 6)], [waiting("large", 5), waiting("small", 4)]) == ["small"]
    # ... and here for one.
    found = decided([running("r", 2)], [waiting("large", 9), waiting("small", 4)])
    assert found["small"].waits_behind == "large"
    assert not found["small"].begins


def test_small_job_starts_only_if_it_delays_no_order_of_ends() -> None:
    """It may be "r"; then "large" starts beside "s", and must find its space."""
    box = {"devices": 4, "memory": 10}
    holders = [running("r", 6), running("s", 2)]
    assert begun(holders, [waiting("large", 7), waiting("small", 1)], box) == ["small"]
    assert begun(holders, [waiting("large", 7), waiting("small", 2)], box) == []


def test_job_that_never_fits_delays_no_other() -> None:
    found = decided([], [waiting("huge", 11), waiting("a", 10)])
    assert found["huge"].never
    assert found["huge"].missing == {"memory": 1}
    assert found["a"].begins


def test_a_job_that_is_not_ready_keeps_its_place() -> None:
    found = decided([], [waiting("lost", 6, is_ready=False), waiting("a", 6), waiting("b", 4)])
    assert [found[name].begins for name in ("lost", "a", "b")] == [True, False, True]


def test_a_job_of_lower_priority_makes_room() -> None:
    found = decided([running("low", 6, priority=1)], [waiting("high", 6)])
    assert found["high"].pauses == ("low",)


def test_no_job_makes_room_for_another_of_its_priority_or_a_lower_one() -> None:
    holders = [running("r", 6, priority=1)]
    for priority in (1, 2):
        assert decided(holders, [waiting("a", 6, priority=priority)])["a"].pauses == ()


def test_the_fewest_are_paused_and_of_them_the_lowest() -> None:
    box = {"devices": 4, "memory": 10}
    holders = [running("low", 3, priority=3), running("middle", 4, priority=2), running("lowest", 2, priority=4)]
    assert decided(holders, [waiting("a", 4)], box)["a"].pauses == ("low",)  # the lowest alone would not free enough
    assert decided(holders, [waiting("a", 5)], box)["a"].pauses == ("middle",)
    assert decided(holders, [waiting("a", 6)], box)["a"].pauses == ("lowest", "low")


def test_of_the_same_priority_the_one_that_came_last_is_paused() -> None:
    box = {"devices": 3, "memory": 10}
    first = Holder(job_id="z", takes=takes(5), priority=1, created_at=1.0, may_be_paused=True)
    second = Holder(job_id="a", takes=takes(5), priority=1, created_at=2.0, may_be_paused=True)
    assert decided([first, second], [waiting("high", 5)], box)["high"].pauses == ("a",)


def test_no_job_is_preempted_if_it_would_not_help() -> None:
    assert decided([running("r", 6), running("low", 2, priority=1)], [waiting("a", 5)])["a"].pauses == ()
    assert decided([running("low", 2, priority=1)], [waiting("huge", 11)])["huge"].pauses == ()


def test_no_job_is_preempted_for_one_that_is_not_ready() -> None:
    assert decided([running("low", 6, priority=1)], [waiting("a", 6, is_ready=False)])["a"].pauses == ()


def test_no_job_is_preempted_if_ending_jobs_free_enough() -> None:
    leaving = Holder(job_id="gone", takes=takes(5), is_leaving=True)
    assert decided([leaving, running("low", 5, priority=1)], [waiting("a", 5)])["a"].pauses == ()
    assert decided([leaving, running("low", 5, priority=1)], [waiting("a", 6)])["a"].pauses == ("low",)


def test_a_job_is_not_paused_before_its_attempt_has_a_step() -> None:
    found = decided([running("low", 6, priority=1, may_leave_now=False)], [waiting("a", 6)])["a"]
    assert (found.pauses, found.will_pause) == ((), True)


def test_two_jobs_do_not_make_the_same_one_pause() -> None:
    holders = [running("low", 5, priority=2), running("lower", 5, priority=3)]
    found = decided(holders, [waiting("a", 5), waiting("b", 5)])
    assert [found["a"].pauses, found["b"].pauses] == [("lower",), ("low",)]


def test_what_a_paused_job_keeps_is_not_free() -> None:
    box = {"devices": 1, "ssd": 10}
    low = Holder(job_id="low", takes={"devices": 1, "ssd": 6}, keeps={"ssd": 6}, priority=1, may_be_paused=True)
    small, large = ({"devices": 1, "ssd": nbytes} for nbytes in (4, 5))
    assert decided([low], [Queued(job_id="a", needs=small)], box)["a"].pauses == ("low",)
    found = decided([low], [Queued(job_id="a", needs=large)], box)["a"]
    assert (found.pauses, found.never, found.missing) == ((), False, {"devices": 1, "ssd": 1})


amounts = st.builds(takes, st.integers(0, 8), st.integers(0, 2))


@st.composite
def situations(draw: st.DrawFn) -> tuple[Amounts, list[Holder], list[Queued]]:
    box = takes(draw(st.integers(4, 10)), draw(st.integers(1, 4)))
    holders: list[Holder] = []
    for number in range(draw(st.integers(0, 4))):
        holder = Holder(
            job_id=f"r{number}",
            takes=draw(amounts),
            priority=draw(st.integers(0, 3)),
            is_leaving=draw(st.booleans()),
            may_be_paused=True,
            may_leave_now=draw(st.booleans()),
        )
        if not missing(box, total(each.takes for each in holders), holder.takes):
            holders.append(holder)
    priorities = sorted(draw(st.lists(st.integers(0, 3), max_size=4)))
    queued = [
        Queued(job_id=f"q{number}", needs=draw(amounts), priority=priority, is_ready=draw(st.booleans()))
        for number, priority in enumerate(priorities)
    ]
    return box, holders, queued


@given(situations())
def test_random_queues_respect_capacity_and_priorities(
    situation: tuple[Amounts, list[Holder], list[Queued]],
) -> None:
    box, holders, queued = situation
    decisions = decide(box, holders, queued)
    assert [decision.job_id for decision in decisions] == [each.job_id for each in queued]
    begun = [each for each, decision in zip(queued, decisions, strict=True) if decision.begins]
    taken = total([*(each.takes for each in holders), *(each.needs for each in begun)])
    assert all(taken[name] <= amount for name, amount in box.items())

    by_id = {holder.job_id: holder for holder in holders}
    pauses = [name for decision in decisions for name in decision.pauses]
    assert len(pauses) == len(set(pauses))
    for each, decision in zip(queued, decisions, strict=True):
        if decision.pauses:
            chosen = [by_id[name] for name in decision.pauses]
            assert each.is_ready
            assert all(h.priority > each.priority and h.may_leave_now and not h.is_leaving for h in chosen)

    # Of the jobs that could have a place, the first without one waits for no lower one, unless it must.
    first = next((pair for pair in zip(queued, decisions, strict=True) if not (pair[1].begins or pair[1].never)), None)
    if first is None or not first[0].is_ready:
        return
    each, decision = first
    ahead = total(other.needs for other in begun if queued.index(other) < queued.index(each))
    stays = [holder for holder in holders if not holder.is_leaving]
    weaker = [holder for holder in stays if holder.priority > each.priority]
    helps = any(
        not missing(box, total([ahead, *(h.takes for h in stays if h not in chosen)]), each.needs)
        for number in range(1, len(weaker) + 1)
        for chosen in combinations(weaker, number)
    )
    suffices = not missing(box, total([ahead, *(h.takes for h in stays)]), each.needs)
    assert (bool(decision.pauses) or decision.will_pause) == (helps and not suffices)


@given(situations())
def test_started_job_delays_no_earlier_job(
    situation: tuple[Amounts, list[Holder], list[Queued]],
) -> None:
    box, holders, queued = situation
    decisions = decide(box, holders, queued)
    before: list[Queued] = []
    there = [holder.takes for holder in holders]
    for each, decision in zip(queued, decisions, strict=True):
        if decision.begins:
            for ahead in before:
                for number in range(len(there) + 1):
                    for staying in combinations(there, number):
                        if not missing(box, total(staying), ahead.needs):
                            assert not missing(box, total([*staying, each.needs]), ahead.needs)
            there.append(each.needs)
        elif not decision.never:
            before.append(each)


# --- the order within a priority ---


def _turn(name: str, owner: str, at: float, **more: Any) -> Turn:
    return Turn(job_id=name, owner=owner, priority=more.pop("priority", 0), created_at=at, **more)


def test_first_job_of_each_owner_goes_before_second_jobs() -> None:
    queued = [_turn("a1", "ann", 1), _turn("a2", "ann", 2), _turn("a3", "ann", 3), _turn("b1", "bob", 4)]
    assert in_turn(queued, {}, {}) == ["a1", "b1", "a2", "a3"]
    assert in_turn(queued, {"ann": 1}, {}) == ["b1", "a1", "a2", "a3"], "those that run count"


def test_owner_whose_last_job_started_longest_ago_goes_first() -> None:
    queued = [_turn("a1", "ann", 1), _turn("b1", "bob", 2), _turn("c1", "cat", 3)]
    assert in_turn(queued, {}, {"ann": 9.0, "bob": 8.0}) == ["c1", "b1", "a1"]


def test_priority_goes_before_fairness_and_kept_places_before_waiting_jobs() -> None:
    queued = [
        _turn("a1", "ann", 1, priority=5),
        _turn("b1", "bob", 2),
        _turn("b2", "bob", 3, keeps_place=True),
        _turn("a2", "ann", 4, priority=-1),
    ]
    assert in_turn(queued, {}, {"bob": 99.0}) == ["a2", "b2", "b1", "a1"]


def test_job_waits_for_nothing_that_its_own_last_attempt_still_holds() -> None:
    own = Holder(job_id="a", takes=takes(10, devices=2), is_leaving=True)
    waiting_again = Queued(job_id="a", needs=takes(10, devices=2), is_ready=False, is_part=True)
    decisions = decided([own], [waiting_again, waiting("b", 1, priority=1)])
    assert decisions["a"].begins, "its resources are kept for it"
    assert not decisions["b"].begins
