"""The phases of an attempt, as the dispatcher sees them."""

import itertools

import pytest

from windlass.service.dispatcher.job_watch import AttemptPhase, AttemptPhaseError, AttemptWatch, JobWatch, JobWatches
from windlass.storage.ids import Attempt

LISTED = {
    (AttemptPhase.RUNNING, AttemptPhase.STOPPING),
    (AttemptPhase.RUNNING, AttemptPhase.EXITING),
    (AttemptPhase.STOPPING, AttemptPhase.EXITING),
    (AttemptPhase.EXITING, AttemptPhase.EXITED),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(AttemptPhase, AttemptPhase)))
def test_enter_only_listed_phases_follow_each_other(before: AttemptPhase, after: AttemptPhase) -> None:
    watch = AttemptWatch(attempt=Attempt(2), phase=before)
    if (before, after) in LISTED:
        watch.enter(after)
        assert watch.phase is after
    else:
        with pytest.raises(AttemptPhaseError, match=f"attempt 2 is {before} and cannot become {after}"):
            watch.enter(after)
        assert watch.phase is before


def test_is_over_begins_with_the_exit() -> None:
    over = [phase for phase in AttemptPhase if AttemptWatch(attempt=Attempt(1), phase=phase).is_over]
    assert over == [AttemptPhase.EXITING, AttemptPhase.EXITED]


def test_job_watches_forgotten_job_begins_anew() -> None:
    watches = JobWatches(JobWatch)
    watches["ftjob-1"].attempt = AttemptWatch(attempt=Attempt(1))
    watches["ftjob-1"].queued.yielded_s = 3.0
    del watches["ftjob-1"]
    assert watches["ftjob-1"] == JobWatch()
