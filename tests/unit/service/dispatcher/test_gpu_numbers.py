"""Jobs whose plans choose the number of GPUs: decisions by hand and at random."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.service.dispatcher.gpu_numbers import FlexibleJob, GpuOption, decide_with_gpus, least_wait_s
from windlass.service.dispatcher.queue_policy import Amounts, Holder, Queued, decide, missing, total

BOX = {"devices": 4, "memory": 16}


def takes(devices: int, memory: int = 0) -> Amounts:
    return {"devices": devices, "memory": memory}


def running(job_id: str, devices: int, memory: int = 0, *, is_leaving: bool = False) -> Holder:
    return Holder(job_id=job_id, takes=takes(devices, memory), is_leaving=is_leaving)


def job(**lasts_s: float) -> FlexibleJob:
    """A job with plans for numbers of GPUs: `g4=10` lasts 10 s with four. The first one is preferred."""
    first, *others = (GpuOption(gpus=int(key[1:]), needs=takes(int(key[1:])), lasts_s=s) for key, s in lasts_s.items())
    return FlexibleJob(preferred=first, others=others)


def begun(
    holders: list[Holder], jobs: Mapping[str, FlexibleJob | int], ends_in_s: Mapping[str, float], **ready: bool
) -> Mapping[str, int]:
    """Returns the GPUs of each job that begins. A number in place of plans: a job with a fixed number."""
    fixed = {name: job if isinstance(job, int) else job.preferred.gpus for name, job in jobs.items()}
    queued = [Queued(job_id=name, needs=takes(gpus), is_ready=ready.get(name, True)) for name, gpus in fixed.items()]
    flexible = {name: job for name, job in jobs.items() if isinstance(job, FlexibleJob)}
    decisions, other = decide_with_gpus(BOX, holders, queued, flexible=flexible, ends_in_s=ends_in_s)
    return {each.job_id: other.get(each.job_id, fixed[each.job_id]) for each in decisions if each.begins}


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


def test_least_wait_counts_the_jobs_in_the_order_of_their_ends() -> None:
    present = [(takes(1), 30.0), (takes(2), 10.0), (takes(1), math.inf)]
    assert [least_wait_s(BOX, present, takes(devices)) for devices in (0, 1, 2, 3, 4)] == [0, 10, 10, 30, math.inf]


_SECONDS = st.sampled_from([0.0, 1.0, 5.0, 20.0, 80.0])


@st.composite
def _scenes(draw: st.DrawFn) -> dict[str, Any]:
    holders, free = list[Holder](), dict(BOX)
    for index in range(draw(st.integers(0, 3))):
        amounts = {name: draw(st.integers(0, left)) for name, left in free.items()}
        free = {name: left - amounts[name] for name, left in free.items()}
        holders.append(Holder(job_id=f"r{index}", takes=amounts, is_leaving=draw(st.booleans())))
    ends_in_s = {holder.job_id: draw(_SECONDS) for holder in holders if draw(st.booleans())}
    queued, flexible = list[Queued](), dict[str, FlexibleJob]()
    for index in range(draw(st.integers(1, 4))):
        name, most = f"q{index}", draw(st.integers(1, 5))
        options = [
            GpuOption(gpus=gpus, needs=takes(gpus, draw(st.integers(0, 20))), lasts_s=draw(_SECONDS))
            for gpus in range(most, 0, -1)
        ]
        if draw(st.booleans()):
            flexible[name] = FlexibleJob(preferred=options[0], others=options[1:])
        queued.append(Queued(job_id=name, needs=options[0].needs, is_ready=draw(st.booleans())))
    return {"holders": holders, "queued": queued, "flexible": flexible, "ends_in_s": ends_in_s}


@given(_scenes())
def test_random_jobs_take_what_is_free_and_begin_with_fewer_only_if_that_is_sooner(scene: dict[str, Any]) -> None:
    holders, queued, flexible = scene["holders"], scene["queued"], scene["flexible"]
    before = decide(BOX, holders, queued)
    decisions, other = decide_with_gpus(BOX, **scene)
    chosen = {
        name: next(option for option in flexible[name].others if option.gpus == gpus) for name, gpus in other.items()
    }
    needs = {job.job_id: chosen[job.job_id].needs if job.job_id in chosen else job.needs for job in queued}
    beginning = [decision.job_id for decision in decisions if decision.begins]
    # What begins is free. Less than nothing is free beside holders only where they take more than there is.
    present = total(holder.takes for holder in holders)
    assert not missing(BOX, present, total(needs[job_id] for job_id in beginning))
    is_before_all = True
    for job, was, now in zip(queued, before, decisions, strict=True):
        assert was.job_id == now.job_id == job.job_id
        if job.job_id in other:
            assert now.begins
            assert job.is_ready
            if is_before_all:  # its own wait, as nothing before it has changed
                assert not was.begins
                ends = [(holder.takes, scene["ends_in_s"].get(holder.job_id, math.inf)) for holder in holders]
                wait_s = least_wait_s(BOX, ends, job.needs)
                assert chosen[job.job_id].lasts_s < wait_s + flexible[job.job_id].preferred.lasts_s
            is_before_all = False
        elif is_before_all:
            assert now == was
    assert decide_with_gpus(BOX, holders, queued, flexible={}, ends_in_s={}) == (before, {})
