"""Jobs of other boxes: whatever is lost, repeated or restored, both databases end with the same job, once."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy.orm import Session

from windlass.storage.sql import Box, Database, IllegalTransition, Job, JobStatus, StatusConflict, migrate
from windlass.storage.sql.repositories import (
    BoxRepository,
    EventRepository,
    Instruction,
    JobReport,
    JobRepository,
    MirrorRepository,
    NewJob,
)

HEAD, ATTIC = "node-head", "node-attic"


def new_database(folder: Path, name: str) -> Database:
    url = f"sqlite:///{folder / name}.db"
    migrate(url)
    return Database(url)


def add_job(session: Session, **values: Any) -> Job:
    fields: dict[str, Any] = {
        "model": "tiny",
        "training_file": "file-1",
        "validation_file": None,
        "suffix": None,
        "seed": 1,
        "method": {},
        "windlass": {"gpus": 1},
        "metadata": {"team": "a"},
        "priority": 0,
        "idempotency_key": None,
        "request_digest": None,
        "node": HEAD,
    }
    jobs = JobRepository(session)
    job = jobs.create(NewJob(**(fields | values)))
    return jobs.transition(
        job.id,
        JobStatus.VALIDATING_FILES,
        JobStatus.QUEUED,
        message="Queued",
        hyperparameters={"batch_size": 2},
        total_steps=4,
    )


def add_box(session: Session, name: str = "attic", node: str = ATTIC) -> Box:
    return BoxRepository(session).add(name=name, node=node, head=HEAD, certificate=name, address="10.0.0.2", facts={})


class Pair:
    """A head and a box, each with its database, and what travels between them."""

    def __init__(self, folder: Path) -> None:
        self.head, self.box = new_database(folder, "head"), new_database(folder, "box")
        with self.head.write() as session:
            self.box_id = add_box(session).id
        self.done = 0  # the last instruction that the box carried out

    def close(self) -> None:
        self.head.close()
        self.box.close()

    @contextmanager
    def of_head(self) -> Iterator[tuple[Session, MirrorRepository, Box]]:
        with self.head.write() as session:
            yield session, MirrorRepository(session), BoxRepository(session).get(self.box_id)

    def row(self, job_id: str) -> Job | None:
        with self.head.read() as session:
            return JobRepository(session).find(job_id)

    def box_row(self, job_id: str) -> Job | None:
        with self.box.read() as session:
            return JobRepository(session).find(job_id)

    def give(self, job_id: str) -> None:
        with self.of_head() as (session, mirror, box):
            mirror.give_away(JobRepository(session).get(job_id), box, message="is being copied")

    def held(self) -> list[str]:
        with self.box.read() as session:
            return sorted(JobRepository(session).all_ids())

    def reports(self, cursors: dict[str, int], *, limit: int = 500) -> list[JobReport]:
        found = []
        with self.box.read() as session:
            mirror, jobs = MirrorRepository(session), JobRepository(session)
            for job_id in self.held():
                if job_id not in cursors:
                    continue
                job = jobs.get(job_id)
                report = mirror.report(job, after=max(0, cursors[job_id]), limit=limit)
                if cursors[job_id] < 0:
                    report = replace(report, row=mirror.row_of(job))
                found.append(report)
        return found

    def arrive(self, reports: list[JobReport], done: int) -> dict[str, int]:
        """The head's part of a call."""
        with self.of_head() as (session, mirror, box):
            BoxRepository(session).confirm(box.id, done)
            for report in reports:
                mirror.apply(box, report, instruction_done=done, here=HEAD, path_of=lambda name: f"/head/{name}")
            return mirror.cursors(box, self.held())

    def take_in(self, cursors: dict[str, int]) -> None:
        """The box's part after an answer: new jobs are added, jobs that the head does not name are discarded."""
        for job_id in cursors:
            row = self.row(job_id)
            if row is not None:
                with self.box.write() as session:
                    MirrorRepository(session).insert(MirrorRepository(session).row_of(row), ATTIC)
        for job_id in self.held():
            if job_id not in cursors:
                with self.box.write() as session:
                    job = JobRepository(session).get(job_id)
                    if job.status in (JobStatus.SUCCEEDED, JobStatus.CANCELLED, JobStatus.FAILED):
                        MirrorRepository(session).forget(job_id)
                    else:
                        MirrorRepository(session).carry_out(Instruction.CANCEL, job_id, {})

    def carry_out(self) -> None:
        with self.head.read() as session:
            waiting = BoxRepository(session).instructions(self.box_id, after=self.done)
        for each in waiting:
            if each.kind != Instruction.TAKE:
                with self.box.write() as session:
                    MirrorRepository(session).carry_out(Instruction(each.kind), each.job_id, each.body)
            self.done = each.ordinal

    def call(self) -> None:
        """Two whole calls: the second one confirms and reports what the first one brought."""
        for _ in range(2):
            cursors = self.arrive(self.reports(self._cursors()), self.done)
            self.take_in(cursors)
            self.carry_out()

    def _cursors(self) -> dict[str, int]:
        with self.of_head() as (_, mirror, box):
            return mirror.cursors(box, self.held())

    # --- the box's dispatcher

    def begin(self, job_id: str) -> None:
        with self.box.write() as session:
            job = JobRepository(session).get(job_id)
            JobRepository(session).transition(
                job_id, JobStatus.QUEUED, JobStatus.RUNNING, message="Begun", attempt=job.attempt + 1
            )

    def end(self, job_id: str, status: JobStatus) -> None:
        with self.box.write() as session:
            job = JobRepository(session).get(job_id)
            JobRepository(session).transition(job_id, job.status, status, message=f"Ended: {status}")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.fixture
def job_id(pair: Pair) -> str:
    with pair.head.write() as session:
        return add_job(session).id


def messages(database: Database, job_id: str) -> list[str]:
    with database.read() as session:
        return [event.message for event in EventRepository(session).since(0, limit=100, job_id=job_id)]


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
