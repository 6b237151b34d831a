"""Jobs whose plans choose the number of GPUs: decisions by hand and at random."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.service.dispatcher.placement.gpu_numbers import GpuOption, place_with_gpus
from windlass.service.dispatcher.placement.placement_policy import BoxState, Candidate, Option, place
from windlass.service.dispatcher.placement.queue_policy import Amounts, Holder, missing, total

HERE = "here"
BOX = {"devices": 4, "memory": 16}


def takes(devices: int, memory: int = 0) -> Amounts:
    return {"devices": devices, "memory": memory}


def running(job_id: str, devices: int, memory: int = 0, *, is_leaving: bool = False) -> Holder:
    return Holder(job_id=job_id, takes=takes(devices, memory), is_leaving=is_leaving)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flexible:
    """A job with plans for several numbers of GPUs, of which the first is preferred."""

    options: Sequence[GpuOption]


def job(**run_s: float) -> Flexible:
    """A job with plans for numbers of GPUs: `g4=10` runs for 10 s with four. The first one is preferred."""
    numbers = {int(key[1:]): seconds for key, seconds in run_s.items()}
    options = [GpuOption(gpus=gpus, needs=takes(gpus), run_s=seconds) for gpus, seconds in numbers.items()]
    return Flexible(options=options)


def candidate(name: str, needs: Amounts, run_s: float | None, *, is_ready: bool = True) -> Candidate:
    return Candidate(job_id=name, options=[Option(box=HERE, needs=needs, run_s=run_s)], is_ready=is_ready)


def begun(
    holders: list[Holder], jobs: Mapping[str, Flexible | int], ends_in_s: Mapping[str, float], **ready: bool
) -> Mapping[str, int]:
    """Returns the GPUs of each job that begins. A number in place of plans: a job with a fixed number."""
    queued, preferred = list[Candidate](), dict[str, int]()
    for name, each in jobs.items():
        first = each.options[0] if isinstance(each, Flexible) else GpuOption(gpus=each, needs=takes(each), run_s=9.0)
        preferred[name] = first.gpus
        queued.append(candidate(name, first.needs, first.run_s, is_ready=ready.get(name, True)))
    fewer = {name: each.options[1:] for name, each in jobs.items() if isinstance(each, Flexible)}
    here = BoxState(name=HERE, has=BOX, holders=holders, left_s=ends_in_s)
    placements, other = place_with_gpus([here], queued, box=HERE, fewer=fewer)
    return {each.job_id: other.get(each.job_id, preferred[each.job_id]) for each in placements if each.decision.begins}


@pytest.mark.parametrize(
    ("ends_s", "expected"),
    [
        (30.0, {"a": 2}),  # 40 s with two now, and 30 + 20 s with four later
        (20.0, {}),  # as long
        (5.0, {}),
        (-9.0, {}),  # overdue: it counts as about to end
        (None, {"a": 2}),  # it may never end
    ],
)
def test_job_begins_with_fewer_gpus_only_if_it_ends_sooner(ends_s: float | None, expected: Mapping[str, int]) -> None:
    ends_in_s = {} if ends_s is None else {"r": ends_s}
    assert begun([running("r", 2)], {"a": job(g4=20, g2=40, g1=70)}, ends_in_s) == expected


def test_job_with_a_fixed_number_waits_for_it() -> None:
    assert begun([running("r", 1)], {"a": 4}, {}) == {}


def test_job_begins_with_the_preferred_number_if_it_is_free() -> None:
    assert begun([], {"a": job(g2=20, g1=39)}, {}) == {"a": 2}


def test_job_takes_the_fewer_gpus_with_which_it_ends_first() -> None:
    assert begun([running("r", 1)], {"a": job(g4=20, g3=29, g2=28, g1=70)}, {}) == {"a": 2}


def test_free_gpus_that_go_to_a_job_before_are_not_taken() -> None:
    """The first job has all four once "r" ends. With two the second one would begin now, and delay it."""
    jobs = {"first": 4, "second": job(g4=20, g2=40)}
    assert begun([running("r", 2)], jobs, {"r": 1.0}) == {}


def test_job_waits_for_room_that_others_make_for_it() -> None:
    leaving = running("r", 2, is_leaving=True)
    assert begun([leaving], {"a": job(g4=20, g2=40)}, {"r": 500.0}) == {}


def test_job_that_is_not_ready_keeps_the_number_that_it_prefers() -> None:
    assert begun([running("r", 2)], {"a": job(g4=20, g2=40)}, {}, a=False) == {}


def test_jobs_behind_see_what_is_left() -> None:
    jobs = {"a": job(g4=20, g2=40), "b": job(g4=20, g1=70)}
    assert begun([running("r", 1)], jobs, {}) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("run_s", "needs_there", "expected"),
    [
        (40.0, takes(2), {"a": 2}),  # the other box is too small as well
        (40.0, takes(1), {"a": 2}),  # there it would begin in 100 s and end after 50 s more
        (160.0, takes(1), {}),
    ],
)
def test_job_that_never_fits_with_the_preferred_number_begins_with_fewer_also_beside_other_boxes(
    run_s: float, needs_there: Amounts, expected: Mapping[str, int]
) -> None:
    options = [Option(box=HERE, needs=takes(4, 20), run_s=20.0), Option(box="other", needs=needs_there, run_s=50.0)]
    boxes = [
        BoxState(name=HERE, has=BOX),
        BoxState(name="other", has=takes(1), holders=[running("r", 1)], left_s={"r": 100.0}),
    ]
    fewer = {"a": [GpuOption(gpus=2, needs=takes(2, 10), run_s=run_s)]}
    placements, other = place_with_gpus(boxes, [Candidate(job_id="a", options=options)], box=HERE, fewer=fewer)
    assert other == expected
    assert placements[0].decision.begins is bool(expected)


_SECONDS = st.sampled_from([0.0, 1.0, 5.0, 20.0, 80.0])


@st.composite
def _scenes(draw: st.DrawFn) -> dict[str, Any]:
    holders, free = list[Holder](), dict(BOX)
    for index in range(draw(st.integers(0, 3))):
        amounts = {name: draw(st.integers(0, left)) for name, left in free.items()}
        free = {name: left - amounts[name] for name, left in free.items()}
        holders.append(Holder(job_id=f"r{index}", takes=amounts, is_leaving=draw(st.booleans())))
    left_s = {holder.job_id: draw(_SECONDS) for holder in holders if draw(st.booleans())}
    queued, fewer = list[Candidate](), dict[str, list[GpuOption]]()
    for index in range(draw(st.integers(1, 4))):
        name, most = f"q{index}", draw(st.integers(1, 5))
        first, *others = (
            GpuOption(gpus=gpus, needs=takes(gpus, draw(st.integers(0, 20))), run_s=draw(_SECONDS))
            for gpus in range(most, 0, -1)
        )
        if draw(st.booleans()):
            fewer[name] = others
        queued.append(candidate(name, first.needs, first.run_s, is_ready=draw(st.booleans())))
    here = BoxState(name=HERE, has=BOX, holders=holders, left_s=left_s)
    elsewhere = BoxState(name="other", has=BOX) if draw(st.booleans()) else None
    if elsewhere is not None:
        queued[0] = Candidate(
            job_id=queued[0].job_id, options=[*queued[0].options, Option(box="other", needs=takes(1), run_s=50.0)]
        )
    return {"boxes": [here, *([elsewhere] if elsewhere else [])], "queued": queued, "fewer": fewer}


@given(_scenes())
def test_random_jobs_take_what_is_free_and_begin_with_fewer_only_if_that_is_sooner(scene: dict[str, Any]) -> None:
    boxes, queued, fewer = scene["boxes"], scene["queued"], scene["fewer"]
    before = place(boxes, queued)
    placements, other = place_with_gpus(boxes, queued, box=HERE, fewer=fewer)
    chosen = {name: next(option for option in fewer[name] if option.gpus == gpus) for name, gpus in other.items()}
    needs = {each.job_id: each.options[0].needs for each in queued}
    needs |= {name: option.needs for name, option in chosen.items()}
    beginning = [each.job_id for each in placements if each.decision.begins and each.box == HERE]
    present = total(holder.takes for holder in boxes[0].holders)
    assert not missing(BOX, present, total(needs[job_id] for job_id in beginning))
    is_same_so_far = True
    for each, was, now in zip(queued, before, placements, strict=True):
        assert was.job_id == now.job_id == each.job_id
        if each.job_id in other:
            assert now.decision.begins
            assert now.box == HERE
            assert each.is_ready
            if is_same_so_far:  # the wait that it avoids is that of its first placement
                assert not was.decision.begins
                assert was.end_s is None or chosen[each.job_id].run_s < was.end_s
            is_same_so_far = False
        elif is_same_so_far:
            assert now == was
    assert place_with_gpus(boxes, queued, box=HERE, fewer={}) == (before, {})
