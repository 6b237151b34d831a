"""The choice of a box: decisions for small fleets, by hand and at random."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.service.dispatcher.placement.test_queue_policy import running, situations, takes
from windlass.service.dispatcher.placement.placement_policy import BoxState, Candidate, Option, Placement, place
from windlass.service.dispatcher.placement.queue_policy import Amounts, Holder, Queued, decide, missing, total


def box(name: str, *holders: Holder, devices: int = 1, memory: int = 10, **more: Any) -> BoxState:
    return BoxState(name=name, has=takes(memory, devices), holders=holders, **more)


def job(job_id: str, runs_s: Mapping[str, float | None], *, memory: int = 5, **more: Any) -> Candidate:
    options = [Option(box=name, needs=takes(memory), run_s=run_s) for name, run_s in runs_s.items()]
    return Candidate(job_id=job_id, options=options, **more)


def placed(boxes: Sequence[BoxState], queued: Sequence[Candidate]) -> Mapping[str, Placement]:
    return {placement.job_id: placement for placement in place(boxes, queued)}


def places(boxes: Sequence[BoxState], queued: Sequence[Candidate]) -> list[tuple[str | None, bool]]:
    return [(placement.box, placement.decision.begins) for placement in place(boxes, queued)]


def test_job_begins_on_the_free_box_where_its_plan_ends_first() -> None:
    assert places([box("a"), box("b")], [job("j", {"a": 9.0, "b": 5.0})]) == [("b", True)]
    assert places([box("a"), box("b")], [job("j", {"a": None, "b": 5.0})]) == [("b", True)]
    assert places([box("a"), box("b")], [job("j", {"a": None, "b": None})]) == [("a", True)]


def test_job_waits_for_a_busy_box_only_if_it_ends_there_sooner() -> None:
    queued = [job("j", {"slow": 100.0, "fast": 10.0})]
    for left_s, expected in ((80.0, ("fast", False)), (90.0, ("slow", True)), (95.0, ("slow", True))):
        fleet = [box("slow"), box("fast", running("r", 5), left_s={"r": left_s})]
        assert places(fleet, queued) == [expected]
    assert places([box("slow"), box("fast", running("r", 5))], queued) == [("slow", True)], "nothing is predicted"


def test_time_that_a_job_has_waited_beside_a_free_box_counts() -> None:
    fleet = [box("slow"), box("fast", running("r", 5), left_s={"r": 50.0})]
    queued = [job("j", {"slow": 100.0, "fast": 10.0}, passed_s=passed_s) for passed_s in (39.0, 40.0)]
    first, second = (place(fleet, [each])[0] for each in queued)
    assert (first.box, first.decision.begins, first.passes) == ("fast", False, True)
    assert (second.box, second.decision.begins, second.passes) == ("slow", True, False)


def test_jobs_that_wait_for_a_box_count_for_the_next() -> None:
    fleet = [box("slow"), box("fast", running("r", 5), left_s={"r": 10.0})]
    queued = [job(name, {"slow": 45.0, "fast": 10.0}) for name in "abcde"]
    # They would end on the fast box after 20 s, 30 s, 40 s and 50 s.
    expected = [("fast", False), ("fast", False), ("fast", False), ("slow", True), ("fast", False)]
    assert places(fleet, queued) == expected


def test_closed_box_gets_nothing() -> None:
    assert places([box("a", is_open=False), box("b")], [job("j", {"a": 1.0, "b": 9.0})]) == [("b", True)]
    assert places([box("a", is_open=False)], [job("j", {"a": 1.0})]) == [(None, False)]


def test_job_that_asks_for_a_box_waits_for_it_beside_an_idle_one() -> None:
    fleet = [box("a", running("r", 5)), box("b")]
    assert places(fleet, [job("j", {"a": 9.0}), job("k", {"a": 9.0, "b": 9.0})]) == [("a", False), ("b", True)]


def test_job_that_fits_no_box_is_placed_nowhere_and_delays_none() -> None:
    fleet = [box("a"), box("b", memory=8)]
    found = placed(fleet, [job("huge", {"a": 1.0, "b": 1.0}, memory=11), job("j", {"a": 1.0, "b": 2.0})])
    assert (found["huge"].box, found["huge"].decision.never) == (None, True)
    assert {name: other.missing["memory"] for name, other in found["huge"].elsewhere.items()} == {"a": 1, "b": 3}
    assert found["j"].box == "a"


def test_jobs_pause_on_the_box_where_the_fewest_have_to() -> None:
    low = [running(f"r{number}", 2, priority=1) for number in range(3)]
    fleet = [box("a", *low[:2], devices=2, memory=4), box("b", low[2], devices=1, memory=4)]
    found = placed(fleet, [job("j", {"a": 1.0, "b": 9.0}, memory=4)])["j"]
    assert (found.box, found.decision.pauses) == ("b", ("r2",))


def test_no_job_pauses_for_one_that_may_begin_elsewhere() -> None:
    fleet = [box("slow"), box("fast", running("low", 5, priority=1), left_s={"low": 10.0})]
    found = placed(fleet, [job("j", {"slow": 100.0, "fast": 10.0})])["j"]
    assert (found.box, found.decision.begins, found.decision.pauses) == ("fast", False, ())


def test_room_is_kept_only_on_the_box_that_a_job_waits_for() -> None:
    fleet = [
        box(name, running(f"r{name}", 1), devices=3, memory=10, left_s={f"r{name}": left_s})
        for name, left_s in (("a", 50.0), ("b", 20.0))
    ]
    large, small = job("large", {"a": 9.0, "b": 9.0}, memory=10), job("small", {"a": 9.0, "b": 9.0})
    assert places(fleet, [large, small]) == [("b", False), ("a", True)]


def test_waiting_job_changes_its_box_only_for_half_the_time() -> None:
    for left_s, expected in ((60.0, "a"), (20.0, "b")):
        fleet = [box("a", running("r", 5), left_s={"r": 90.0}), box("b", running("s", 5), left_s={"s": left_s})]
        assert places(fleet, [job("j", {"a": 10.0, "b": 10.0}, waits_for="a")]) == [(expected, False)]


def test_box_of_a_waiting_job_is_open_to_jobs_that_do_not_delay_it() -> None:
    fleet = [box("a", running("r", 6), devices=3, left_s={"r": 10.0})]
    assert places(fleet, [job("large", {"a": 5.0}, memory=5), job("small", {"a": 50.0}, memory=4)]) == [
        ("a", False),
        ("a", True),
    ]


# --- at random ---

_seconds = st.one_of(st.none(), st.floats(0, 100))


def over_boxes(job_id: str, *names: str, **more: Any) -> Candidate:
    """A job that needs all devices of each of its boxes."""
    return Candidate(job_id=job_id, options=[Option(box=name, needs=takes(0)) for name in names], together=True, **more)


def test_job_over_several_boxes_begins_on_all_at_once_or_waits_for_all() -> None:
    assert places([box("a"), box("b")], [over_boxes("j", "a", "b")]) == [("a", True)]
    for busy in ("a", "b"):
        fleet = [box(name, *([running("r", 5)] if name == busy else [])) for name in ("a", "b")]
        assert places(fleet, [over_boxes("j", "a", "b")]) == [("a", False)]


def test_job_over_several_boxes_keeps_its_place_on_each() -> None:
    fleet, later = [box("a"), box("b", running("r", 5)), box("c")], [job("k", {"a": 1.0}), job("l", {"c": 1.0})]
    assert places(fleet, [over_boxes("j", "a", "b"), *later]) == [("a", False), ("a", False), ("c", True)]
    begun = [over_boxes("j", "a", "c"), *later]
    assert places(fleet, begun) == [("a", True), ("a", False), ("c", False)]
    is_copied = [over_boxes("j", "a", "c", is_ready=False), *later]
    assert places(fleet, is_copied) == [("a", True), ("a", False), ("c", False)], "its room is kept until it is ready"


def test_job_over_several_boxes_waits_behind_earlier_jobs() -> None:
    fleet = [box("a", running("r", 5)), box("b")]
    assert places(fleet, [job("k", {"a": 1.0}), over_boxes("j", "b", "a")]) == [("a", False), ("b", False)]


def test_job_over_a_closed_box_keeps_no_room_elsewhere() -> None:
    fleet = [box("a"), box("b", is_open=False)]
    assert places(fleet, [over_boxes("j", "a", "b"), job("k", {"a": 1.0})]) == [(None, False), ("a", True)]


def test_jobs_pause_on_all_boxes_at_once_for_one_over_several() -> None:
    fleet = [box("a", running("r", 5, priority=5)), box("b"), box("c", running("s", 5, priority=1))]
    [found] = place(fleet, [over_boxes("j", "a", "b", "c")])
    assert (found.by_pausing, found.decision.begins, found.decision.pauses) == (True, False, ("r",))
    assert {name: decision.pauses for name, decision in found.elsewhere.items()} == {"b": (), "c": ("s",)}


def test_no_job_pauses_for_one_over_several_boxes_that_could_not_begin_then() -> None:
    fleet = [box("a", running("r", 5, priority=5)), box("b", running("s", 5))]
    [found] = place(fleet, [over_boxes("j", "a", "b")])
    assert (found.by_pausing, found.decision.pauses, found.decision.will_pause) == (False, (), False)


def test_jobs_pause_for_one_over_several_boxes_once_each_may() -> None:
    fleet = [box("a", running("r", 5, priority=5)), box("b", running("s", 5, priority=5, may_leave_now=False))]
    [found] = place(fleet, [over_boxes("j", "a", "b")])
    assert (found.by_pausing, found.decision.pauses, found.decision.will_pause) == (True, (), True)
    assert found.elsewhere["b"].pauses == ()


def test_boxes_are_kept_while_jobs_leave_one_of_them() -> None:
    fleet = [box("a", replace(running("r", 5, priority=5), is_leaving=True)), box("b", running("s", 5, priority=5))]
    [found] = place(fleet, [over_boxes("j", "a", "b")])
    assert (found.by_pausing, found.decision.begins) == (True, False)
    assert found.elsewhere["b"].pauses == ("s",)


def test_part_of_a_job_pauses_only_for_another_job_over_several_boxes() -> None:
    part = replace(running("r", 5, priority=5), is_part=True)
    fleet = [box("a"), box("b", part)]
    assert place(fleet, [job("j", {"b": 1.0})])[0].decision.pauses == ()
    [found] = place(fleet, [over_boxes("j", "a", "b")])
    assert found.elsewhere["b"].pauses == ("r",)


def test_two_jobs_over_the_same_boxes_begin_one_after_the_other() -> None:
    queued = [over_boxes("i", "a", "b"), over_boxes("j", "b", "c")]
    assert places([box("a"), box("b"), box("c")], queued) == [("a", True), ("b", False)]


@given(situations(), st.data())
def test_one_box_decides_as_the_queue_of_a_machine(
    situation: tuple[Amounts, list[Holder], list[Queued]], data: st.DataObject
) -> None:
    has, holders, queued = situation
    left_s = {holder.job_id: data.draw(st.floats(0, 100)) for holder in holders if data.draw(st.booleans())}
    candidates = [
        Candidate(
            job_id=each.job_id,
            options=[Option(box="head", needs=each.needs, run_s=data.draw(_seconds))],
            priority=each.priority,
            is_ready=each.is_ready,
            waits_for=data.draw(st.sampled_from([None, "head"])),
        )
        for each in queued
    ]
    found = place([BoxState(name="head", has=has, holders=holders, left_s=left_s)], candidates)
    assert [placement.decision for placement in found] == list(decide(has, holders, queued))
    assert all(placement.box == "head" for placement in found)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[BoxState], list[Candidate]]:
    boxes = []
    for number in range(draw(st.integers(1, 4))):
        has, holders, _ = draw(situations())
        holders = [replace(holder, job_id=f"b{number}-{holder.job_id}") for holder in holders]
        left_s = {holder.job_id: draw(st.floats(0, 100)) for holder in holders if draw(st.booleans())}
        is_open = draw(st.integers(0, 4)) > 0
        boxes.append(BoxState(name=f"b{number}", has=has, holders=holders, left_s=left_s, is_open=is_open))
    names = [each.name for each in boxes]
    queued = []
    for number, priority in enumerate(sorted(draw(st.lists(st.integers(0, 3), max_size=6)))):
        where = draw(st.sampled_from([names, *([name] for name in names)]))
        needs = takes(draw(st.integers(0, 8)), draw(st.integers(1, 2)))
        options = [Option(box=name, needs=needs, run_s=draw(_seconds)) for name in where]
        queued.append(
            Candidate(
                job_id=f"q{number}",
                options=options,
                priority=priority,
                is_ready=draw(st.integers(0, 4)) > 0,
                waits_for=draw(st.sampled_from([None, *names])),
            )
        )
    return boxes, queued


def needs_at(candidate: Candidate, name: str) -> Amounts:
    return next(option.needs for option in candidate.options if option.box == name)


@given(fleets())
def test_random_fleets_are_never_overfilled_and_options_are_respected(
    situation: tuple[list[BoxState], list[Candidate]],
) -> None:
    boxes, queued = situation
    found = place(boxes, queued)
    assert [placement.job_id for placement in found] == [each.job_id for each in queued]
    for candidate, placement in zip(queued, found, strict=True):
        assert placement.box in (None, *(option.box for option in candidate.options))
        assert not placement.decision.begins or placement.box is not None
    for each in boxes:
        begun = [
            needs_at(candidate, each.name)
            for candidate, placement in zip(queued, found, strict=True)
            if placement.box == each.name and placement.decision.begins
        ]
        assert each.is_open or not begun
        taken = total([*(holder.takes for holder in each.holders), *begun])
        assert all(taken[name] <= amount for name, amount in each.has.items())


@given(fleets())
def test_no_open_box_is_idle_while_a_job_waits_that_fits_it(
    situation: tuple[list[BoxState], list[Candidate]],
) -> None:
    boxes, queued = situation
    found = place(boxes, queued)
    used = {placement.box for placement in found if placement.decision.begins}
    for each in boxes:
        if not each.is_open or each.holders or each.name in used:
            continue
        for candidate, placement in zip(queued, found, strict=True):
            option = next((option for option in candidate.options if option.box == each.name), None)
            if option is None or placement.decision.begins or missing(each.has, {}, option.needs):
                continue
            assert placement.box not in (None, each.name)
            assert option.run_s is not None
            assert placement.end_s is not None
            assert placement.end_s < option.run_s, "it ends sooner on the box for which it waits"


@given(fleets())
def test_job_begins_as_if_later_jobs_did_not_exist(situation: tuple[list[BoxState], list[Candidate]]) -> None:
    boxes, queued = situation
    found = place(boxes, queued)
    for number in range(len(queued)):
        assert list(found[:number]) == list(place(boxes, queued[:number]))


@given(fleets())
def test_on_each_box_no_job_delays_an_earlier_one_that_waits_there(
    situation: tuple[list[BoxState], list[Candidate]],
) -> None:
    boxes, queued = situation
    found = place(boxes, queued)
    for each in boxes:
        entered = [
            (candidate.at(option), placement.decision)
            for candidate, placement in zip(queued, found, strict=True)
            for option in candidate.options
            if option.box == placement.box == each.name
        ]
        decisions = decide(each.has, each.holders, [job for job, _ in entered])
        for (_, here), alone in zip(entered, decisions, strict=True):
            assert here.begins == alone.begins
            assert set(here.pauses) <= set(alone.pauses)


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 2), st.floats(1, 20), st.floats(0.5, 2)), max_size=30),
    st.integers(1, 3),
)
def test_every_job_begins_though_smaller_ones_keep_coming(
    small: list[tuple[int, int, float, float]], num_boxes: int
) -> None:
    """A job that needs a whole box begins once the jobs that were there have ended, whatever comes after it.

    `small`: memory, devices, predicted seconds of each later job, and the factor by which it takes longer or shorter.
    """
    names = [f"b{number}" for number in range(num_boxes)]
    running_s = {name: {f"first-{name}": (takes(5), 20.0)} for name in names}  # by job: amounts, remaining seconds
    waits_for: str | None = None
    coming = list(small)
    for _ in range(60):
        large = Candidate(
            job_id="large",
            options=[Option(box=name, needs=takes(10, 2), run_s=10.0) for name in names],
            waits_for=waits_for,
        )
        queued = [large]
        for number, (memory, devices, run_s, _) in enumerate(coming[:3]):
            options = [Option(box=name, needs=takes(memory, devices), run_s=run_s) for name in names]
            queued.append(Candidate(job_id=f"s{len(coming) - number}", options=options))
        boxes = [
            BoxState(
                name=name,
                has=takes(10, 2),
                holders=[Holder(job_id=each, takes=amounts) for each, (amounts, _) in running_s[name].items()],
                left_s={each: max(0.0, left_s) for each, (_, left_s) in running_s[name].items()},
            )
            for name in names
        ]
        found = place(boxes, queued)
        if found[0].decision.begins:
            return
        waits_for = found[0].box
        for candidate, placement in zip(queued[1:], found[1:], strict=True):
            if placement.decision.begins and placement.box is not None:
                taken, factor = needs_at(candidate, placement.box), coming[0][3]
                running_s[placement.box][candidate.job_id] = (taken, (candidate.options[0].run_s or 0.0) * factor)
        coming = coming[3:]
        for name in names:
            left = {each: (amounts, left_s - 1.0) for each, (amounts, left_s) in running_s[name].items()}
            running_s[name] = {each: value for each, value in left.items() if value[1] > 0}
    raise AssertionError("it never began")
