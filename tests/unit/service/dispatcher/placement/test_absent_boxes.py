"""Jobs of boxes that are away wait, with the reason."""

import time
from pathlib import Path

import pytest

from tests.support.storage.mirrored_pair import HEAD, Pair, add_job, messages
from windlass.service.dispatcher.placement.absent_boxes import watch_absent_boxes
from windlass.storage.sql.repositories import BoxRepository
from windlass.storage.sql.repositories.boxes import is_away


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A head and a box that runs the only job."""
    pair = Pair(tmp_path)
    with pair.head.write() as session:
        job_id = add_job(session).id
    pair.give(job_id)
    pair.call()
    pair.begin(job_id)
    pair.call()
    return pair


def watch(pair: Pair) -> None:
    with pair.head.read() as session:
        absent = [box for box in BoxRepository(session).all(HEAD) if is_away(box)]
    watch_absent_boxes(pair.head, absent)


def test_a_job_of_a_box_that_is_away_waits_until_it_is_back(pair: Pair) -> None:
    [job_id] = pair.held()
    with pair.head.write() as session:
        BoxRepository(session).set(pair.box_id, seen_at=time.time() - 100)
    for _ in range(2):
        watch(pair)
    row = pair.row(job_id)
    assert row is not None
    assert row.waiting_reason is not None
    assert row.waiting_reason.startswith("box attic, which holds its states, is away since ")
    assert (row.status, row.attempt) == ("running", 1)
    assert len([told for told in messages(pair.head, job_id) if "is away since" in told]) == 1
    with pair.head.write() as session:
        BoxRepository(session).set(pair.box_id, seen_at=time.time())
    pair.call()
    watch(pair)
    row = pair.row(job_id)
    assert row is not None
    assert row.waiting_reason is None
