"""Faults in simulated jobs over boxes: time lost, ends of attempts, and the commits that they go on from."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.planner.simulated import rates
from tests.support.planner.simulated_boxes import SimulatedBoxes, job_over
from windlass.planner.simulation.boxes.faults import BoxLost, Fault, FaultedRun, LinkCut, run_with_faults, slowed
from windlass.planner.simulation.simulate import steady_step_s

STEP_S, NUM_STEPS = 16.0, 4  # see `test_boxes.py`


def faulted(*faults: Fault, job: SimulatedBoxes | None = None, silence_s: float = 30.0) -> FaultedRun:
    made = (job or job_over(3, 6, num_steps=NUM_STEPS)).started(keeps_spans=False)
    return run_with_faults(made, faults, silence_s=silence_s)


def test_without_faults_all_steps_are_committed() -> None:
    run = faulted()
    assert run.lost_s is None
    assert run.step_ends_s == pytest.approx([STEP_S * (step + 1) for step in range(NUM_STEPS)], abs=1e-5)
    assert run.resumes_after == NUM_STEPS


@pytest.mark.parametrize(
    ("at_s", "lost_s"),
    [
        # The first box sends at 3 and 6 s of each step, and receives at 8 and 13 s.
        (2.0, 10.0 - 1.0),  # until 12 s: what was to pass at 3 s passes then
        (13.5, 10.0 - 5.5),  # until 23.5 s: what was to pass at 19 s
    ],
)
def test_a_short_cut_delays_what_was_to_pass_meanwhile(at_s: float, lost_s: float) -> None:
    run = faulted(LinkCut(one=1, other=0, at_s=at_s, duration_s=10.0))
    assert run.lost_s is None
    assert run.resumes_after == NUM_STEPS
    assert run.step_ends_s[-1] == pytest.approx(NUM_STEPS * STEP_S + lost_s, abs=1e-5)


def test_a_cut_that_nothing_passes_in_costs_nothing() -> None:
    assert faulted(LinkCut(one=0, other=1, at_s=3.5, duration_s=2.0)).step_ends_s == faulted().step_ends_s


@pytest.mark.parametrize("fault", [LinkCut(one=0, other=1, at_s=34.0, duration_s=31.0), BoxLost(box=1, at_s=34.0)])
def test_a_box_without_an_answer_for_too_long_ends_the_attempt(fault: Fault) -> None:
    # Step 2 was over at 32 s.
    run = faulted(fault)
    assert run.lost_s == 34.0 + 30.0
    assert run.resumes_after == 2
    assert len(run.step_ends_s) == 2


def test_the_first_box_ends_the_attempt_at_once() -> None:
    run = faulted(BoxLost(box=0, at_s=34.0))
    assert (run.lost_s, run.resumes_after) == (34.0, 2)


def test_two_cuts_that_overlap_are_one() -> None:
    cuts = [LinkCut(one=0, other=1, at_s=at_s, duration_s=20.0) for at_s in (10.0, 25.0)]
    assert faulted(*cuts).lost_s == 40.0
    apart = [LinkCut(one=0, other=1, at_s=at_s, duration_s=20.0) for at_s in (10.0, 31.0)]
    assert faulted(*apart).lost_s is None


def test_a_commit_that_one_ssd_misses_does_not_count() -> None:
    # A commit takes 4 s: that of step 1 begins at 16 s, and box 1 dies before its SSDs have it.
    job = job_over(3, 6, num_steps=NUM_STEPS, machine=rates(commit_s=4.0))
    assert faulted(BoxLost(box=1, at_s=19.0), job=job).resumes_after == 0
    assert faulted(BoxLost(box=1, at_s=20.5), job=job).resumes_after == 1
    # All SSDs have it at 20 s, and the first box decides it although it hears of it only after the cut, or never.
    assert faulted(LinkCut(one=0, other=1, at_s=19.0, duration_s=60.0), job=job).resumes_after == 1


def test_a_slow_box_slows_the_step() -> None:
    job = job_over(3, 6, num_groups=8)
    first, other = job.boxes
    slow = slowed(other, 4.0)
    seconds = steady_step_s(first.context, job.shape, first.rates, first.work, others=[slow], network=job.network)
    assert seconds == pytest.approx(8 * 5 * 4.0 + 3.0 + 3.0, abs=1e-5)  # as in `test_a_slower_box_bounds_the_step`
    assert slow.rates.ssd_read_bytes == tuple(rate / 4 for rate in other.rates.ssd_read_bytes)


CUTS = st.builds(
    LinkCut,
    one=st.integers(0, 0),
    other=st.integers(1, 2),
    at_s=st.floats(0.0, 60.0),
    duration_s=st.floats(0.1, 40.0),
) | st.builds(LinkCut, one=st.just(1), other=st.just(2), at_s=st.floats(0.0, 60.0), duration_s=st.floats(0.1, 40.0))
LOSSES = st.builds(BoxLost, box=st.integers(0, 2), at_s=st.floats(0.0, 60.0))


@settings(max_examples=examples(60), deadline=None)
@given(faults=st.lists(CUTS | LOSSES, max_size=4), commit_s=st.sampled_from([0.0, 3.0]), is_tied=st.booleans())
def test_any_faults_end_the_job_or_the_attempt(faults: list[Fault], commit_s: float, is_tied: bool) -> None:
    job = job_over(2, 4, 6, num_steps=3, machine=rates(commit_s=commit_s), is_tied=is_tied, num_groups=3)
    job = replace(job, network=replace(job.network, round_trip_s=0.01))
    run, alone = faulted(*faults, job=job), faulted(job=job)
    # No fault makes a step sooner, and none is lost that was committed.
    assert all(late >= soon - 1e-6 for late, soon in zip(run.step_ends_s, alone.step_ends_s, strict=False))
    if run.lost_s is None:
        assert run.resumes_after == 3
    else:
        assert 0 <= run.resumes_after <= len(run.step_ends_s)
