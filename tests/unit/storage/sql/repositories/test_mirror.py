"""Jobs of other boxes: whatever is lost, repeated or restored, both databases end with the same job, once."""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import update

from tests.support.storage.mirrored_pair import ATTIC, HEAD, Pair, add_job, messages
from windlass.storage.sql import IllegalTransition, JobStatus, StatusConflict
from windlass.storage.sql.models import JobEvent
from windlass.storage.sql.repositories import (
    Instruction,
    JobReport,
    JobRepository,
    MirrorRepository,
)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.fixture
def job_id(pair: Pair) -> str:
    with pair.head.write() as session:
        return add_job(session).id


def test_a_job_goes_to_a_box_and_comes_back_ended(pair: Pair, job_id: str) -> None:
    pair.give(job_id)
    assert pair.box_row(job_id) is None
    pair.call()
    taken = pair.box_row(job_id)
    assert taken is not None
    assert (taken.status, taken.node, taken.job_metadata) == ("queued", ATTIC, {"team": "a"})
    pair.begin(job_id)
    pair.call()
    row = pair.row(job_id)
    assert row is not None
    assert (row.status, row.attempt, row.node) == ("running", 1, ATTIC)
    pair.end(job_id, JobStatus.SUCCEEDED)
    pair.call()
    row = pair.row(job_id)
    assert row is not None
    assert (row.status, row.node) == ("succeeded", HEAD)
    assert messages(pair.head, job_id)[-2:] == ["Begun", "Ended: succeeded"]
    assert pair.held() == []


def test_a_job_that_is_not_taken_yet_is_taken_back(pair: Pair, job_id: str) -> None:
    pair.give(job_id)
    with pair.of_head() as (_, mirror, _box):
        assert mirror.take_back(job_id, HEAD)
    pair.call()
    row = pair.row(job_id)
    assert row is not None
    assert (row.node, row.status) == (HEAD, "queued")
    assert pair.held() == []


def test_a_job_that_a_box_has_is_not_taken_back(pair: Pair, job_id: str) -> None:
    pair.give(job_id)
    pair.call()
    with pair.of_head() as (_, mirror, _box):
        assert not mirror.take_back(job_id, HEAD)


def test_a_job_that_changed_is_not_given_away(pair: Pair, job_id: str) -> None:
    seen = pair.row(job_id)
    assert seen is not None
    with pair.head.write() as session:
        JobRepository(session).transition(job_id, JobStatus.QUEUED, JobStatus.RUNNING, message="Begun", attempt=1)
    with pytest.raises(StatusConflict), pair.of_head() as (_, mirror, box):
        mirror.give_away(seen, box, message="is being copied")


def test_a_request_shows_at_once_and_older_reports_do_not_undo_it(pair: Pair, job_id: str) -> None:
    pair.give(job_id)
    pair.call()
    pair.begin(job_id)
    pair.call()
    before = pair.reports({job_id: 0})
    with pair.of_head() as (_, mirror, _box):
        job = mirror.request(Instruction.PAUSE, job_id, here=HEAD)
        assert job.status == "pausing"
    pair.arrive(before, pair.done)  # sent before the box knew
    row = pair.row(job_id)
    assert row is not None
    assert row.status == "pausing"
    pair.call()
    taken, row = pair.box_row(job_id), pair.row(job_id)
    assert taken is not None
    assert row is not None
    assert taken.status == row.status == "pausing"
    assert messages(pair.head, job_id).count("Pausing: the runner ends its attempt after its step") == 1


def test_a_request_that_comes_too_late_changes_nothing(pair: Pair, job_id: str) -> None:
    pair.give(job_id)
    pair.call()
    pair.begin(job_id)
    pair.call()
    pair.end(job_id, JobStatus.FAILED)
    with pair.of_head() as (_, mirror, _box):
        mirror.request(Instruction.CANCEL, job_id, here=HEAD)
    pair.call()
    row = pair.row(job_id)
    assert row is not None
    assert row.status == "failed"


def test_a_job_that_the_head_does_not_know_is_adopted(pair: Pair, job_id: str) -> None:
    pair.give(job_id)
    pair.call()
    pair.begin(job_id)
    with pair.head.write() as session:  # an older backup was restored
        MirrorRepository(session).forget(job_id)
    pair.call()
    row = pair.row(job_id)
    assert row is not None
    assert (row.status, row.node, row.model) == ("running", ATTIC, "tiny")
    assert messages(pair.head, job_id) == ["Begun"]


def test_a_job_that_the_head_has_as_queued_again_goes_on_at_its_box(pair: Pair, job_id: str) -> None:
    pair.give(job_id)
    pair.call()
    pair.begin(job_id)
    with pair.head.write() as session:  # a backup from before it was given away was restored
        JobRepository(session).get(job_id).node = HEAD
    pair.call()
    row = pair.row(job_id)
    assert row is not None
    assert (row.status, row.node) == ("running", ATTIC)


def test_a_gift_of_an_earlier_release_counts_by_the_boxs_name_and_a_later_one_by_its_id(
    pair: Pair, job_id: str
) -> None:
    pair.give(job_id)
    for name, data, is_its in (
        ("attic", None, True),
        ("cellar", None, True),
        ("attic", {"box": "attic"}, True),
        ("cellar", {"box": "attic"}, False),
        ("attic", {"box": "attic", "box_id": "another box's"}, False),
    ):
        with pair.of_head() as (session, mirror, box):
            box.name = name
            if data is not None:
                session.execute(update(JobEvent).where(JobEvent.job_id == job_id).values(data=data))
            session.flush()
            session.expire_all()
            assert mirror.was_given(job_id, box) is is_its, (name, data)


class Network(RuleBasedStateMachine):
    """Calls are lost, repeated and delayed, users request, and the box's dispatcher works, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[list[JobReport], int]] = []
        self.answers: list[dict[str, int]] = []

    @initialize()
    def begin_all(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pair = Pair(Path(self.folder.name))
        with self.pair.head.write() as session:
            self.job_id = add_job(session).id

    @rule()
    def give(self) -> None:
        row = self.pair.row(self.job_id)
        if row is not None and row.status is JobStatus.QUEUED and row.node == HEAD and row.attempt == 0:
            self.pair.give(self.job_id)

    @rule()
    def take_back(self) -> None:
        with self.pair.of_head() as (_, mirror, _box):
            mirror.take_back(self.job_id, HEAD)

    @rule(kind=st.sampled_from([Instruction.CANCEL, Instruction.PAUSE, Instruction.RESUME]))
    def request(self, kind: Instruction) -> None:
        row = self.pair.row(self.job_id)
        if row is None or (row.node == HEAD and row.attempt > 0):
            return
        with suppress(IllegalTransition, StatusConflict), self.pair.of_head() as (_, mirror, _box):
            mirror.request(kind, self.job_id, here=HEAD)

    @rule()
    def send(self) -> None:
        self.sent.append((self.pair.reports(self.pair._cursors()), self.pair.done))

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), stays=st.booleans())
    def arrive(self, data: st.DataObject, stays: bool) -> None:
        index = data.draw(st.integers(0, len(self.sent) - 1))
        reports, done = self.sent[index]
        if not stays:
            del self.sent[index]
        # A connection carries one call after the other: only the last answer counts.
        self.answers = [self.pair.arrive(reports, done)]

    @precondition(lambda self: self.answers)
    @rule()
    def answer(self) -> None:
        cursors = self.answers.pop()
        if cursors == self.pair._cursors():  # the box asks again before it acts on an answer that is not current
            self.pair.take_in(cursors)

    @rule()
    def carry_out(self) -> None:
        self.pair.carry_out()

    @rule(status=st.sampled_from([JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.QUEUED]))
    def work(self, status: JobStatus) -> None:
        row = self.pair.box_row(self.job_id)
        if row is None:
            return
        if row.status is JobStatus.QUEUED:
            self.pair.begin(self.job_id)
        elif row.status is JobStatus.RUNNING:
            self.pair.end(self.job_id, JobStatus.CANCELLED if row.cancel_requested else status)
        elif row.status is JobStatus.PAUSING:
            self.pair.end(self.job_id, JobStatus.CANCELLED if row.cancel_requested else JobStatus.PAUSED)

    @invariant()
    def the_head_never_takes_back_a_job_that_began(self) -> None:
        if not hasattr(self, "pair"):
            return
        row, taken = self.pair.row(self.job_id), self.pair.box_row(self.job_id)
        assert row is not None
        if taken is not None and taken.attempt > 0 and taken.status not in ("succeeded", "failed", "cancelled"):
            assert row.node == ATTIC

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        for _ in range(4):
            self.pair.call()
        row, taken = self.pair.row(self.job_id), self.pair.box_row(self.job_id)
        assert row is not None
        told = messages(self.pair.head, self.job_id)
        if taken is not None and row.node == ATTIC and row.status not in ("cancelled",):
            assert (row.status, row.attempt) == (taken.status, taken.attempt)
        assert told.count("Begun") == row.attempt
        if row.node == HEAD:
            assert taken is None
        self.pair.close()
        self.folder.cleanup()


Network.TestCase.settings = settings(
    max_examples=8,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_network = Network.TestCase
