"""A commit that is not decided: the states before it stay until all SSDs of the job have it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.storage.direct_store import DirectStore
from tests.support.storage.stores import JOB, check, commit, fill, keys, new_store, open_volume, resume
from windlass.storage.ids import Attempt, StateKind, Step
from windlass.storage.integrity.errors import StepNotAllowed
from windlass.storage.ssd.volume import Volume
from windlass.storage.store.format import NUM_COMMIT_RECORDS


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    volume = open_volume(tmp_path)
    yield volume
    volume.close()


def prepare(store: DirectStore, step: int) -> None:
    fill(store, step)
    store.prepare(Step(step), store.attempt, f'{{"step": {step}}}')


def reopen(volume: Volume, attempt: int, step: int) -> DirectStore:
    """Opens the store for a new attempt, which resumes from a step."""
    store = DirectStore.open(volume, JOB, Attempt(attempt))
    store.resume_from(next(each for each in reversed(store.commits()) if each.step == step))
    return store


def test_later_steps_are_refused_until_it_is_decided(volume: Volume) -> None:
    store = new_store(volume)
    for step in range(3):
        prepare(store, step)
        check(store, step)
        for kind in (StateKind.PARAM, StateKind.GRAD):
            with pytest.raises(StepNotAllowed, match=f"cannot write step {step + 1} before step {step} is decided"):
                store.regions_to_write(keys(store.geometry)[0], Step(step + 1), [(kind, 4096)])
        with pytest.raises(StepNotAllowed, match=f"cannot commit step {step + 1} before step {step} is decided"):
            store.prepare(Step(step + 1), Attempt(1), "{}", states_step=Step(step))
        store.decide(Step(step))
        store.decide(Step(step))  # a repeated message


def test_the_commit_before_is_intact_for_the_next_attempt(volume: Volume) -> None:
    store = new_store(volume)
    commit(store, 0)
    commit(store, 1)
    prepare(store, 2)
    store = reopen(volume, attempt=2, step=1)
    check(store, 1)
    with pytest.raises(StepNotAllowed, match="cannot read"):
        check(store, 2)
    prepare(store, 2)  # resumed from a decided step, so the next one may be written
    check(store, 2, attempt=2)
    check(reopen(volume, attempt=3, step=1), 1)


def test_late_decision_changes_nothing_and_one_ahead_is_refused(volume: Volume) -> None:
    store = new_store(volume)
    with pytest.raises(StepNotAllowed, match="step 0 was decided, but nothing is the last commit here"):
        store.decide(Step(0))
    commit(store, 0)
    prepare(store, 1)
    store.decide(Step(0))
    with pytest.raises(StepNotAllowed, match="before step 1 is decided"):
        fill(store, 2)
    with pytest.raises(StepNotAllowed, match="step 2 was decided, but step 1 is the last commit here"):
        store.decide(Step(2))


def test_skipped_step_waits_as_well(volume: Volume) -> None:
    store = new_store(volume)
    commit(store, 0)
    store.prepare(Step(1), Attempt(1), "{}", states_step=Step(0))
    with pytest.raises(StepNotAllowed, match="before step 1 is decided"):
        fill(store, 2)
    store.decide(Step(1))
    commit(store, 2)


def test_entries_repeat_the_last_decided_step(volume: Volume) -> None:
    store = new_store(volume)
    for step in range(3):
        commit(store, step)
    assert [record.decided for record in store.commits()] == [None, 0, 1]
    assert [record.decided for record in resume(volume, attempt=2).commits()] == [None, 0, 1, 2]


def test_attempts_that_end_before_all_ssds_adopted_do_not_fill_the_journal(volume: Volume) -> None:
    """Another SSD has no entry of these attempts, so their adoptions are void: each replaces the one before."""
    store = new_store(volume)
    commit(store, 0)
    commit(store, 1)
    first = store.commits()[-1]
    prepare(store, 2)
    for attempt in range(2, NUM_COMMIT_RECORDS + 40):
        store = DirectStore.open(volume, JOB, Attempt(attempt))
        assert first.identity in {record.identity for record in store.commits()}
        store.resume_from(first)
    assert [(record.step, record.attempt) for record in store.commits()] == [(0, 1), (1, 1), (2, 1), (1, attempt)]
    check(store, 1)
    commit(store, 2)
    check(resume(volume, attempt + 1), 2, attempt)
