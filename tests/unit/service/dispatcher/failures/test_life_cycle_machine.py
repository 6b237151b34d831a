"""Jobs under all events in any order, with two dispatchers of one home on two machines.

Users create, cancel, pause and resume over the API. The API's process and the dispatchers are killed at any of their
writes, before or after the commit. Dispatchers freeze until the other takes over. Runners train, end, fail, are
interrupted and die.

In every case each status follows from the previous one, and no event is lost or repeated. No job runs twice at once,
and none is forgotten. No job gets memory or a device of another one, or runs in place of one of higher priority.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from tests.support.postgresql import PostgresServer
from tests.support.service.api_client import context_of, make_model, serve, upload
from tests.support.service.dispatcher_stage import Stage, StandInRunners, planned
from windlass.actors.job.journal import Journal, JournalRecord, read_journal
from windlass.actors.job.spec import JobSpec
from windlass.actors.lifecycle.attempt_lock import tell_alive
from windlass.actors.scheduler.scheduler import INTERRUPTED, PAUSED
from windlass.amounts import GIB
from windlass.service.dispatcher.dispatcher import Dispatcher
from windlass.service.dispatcher.lease import BEAT_S, LEASE_S
from windlass.service.dispatcher.placement.capacity import MachineCapacity
from windlass.service.installation.settings import Settings
from windlass.service.preparation.pipeline import PreparationError
from windlass.storage.ids import Attempt
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.job_status import TERMINAL_STATUSES, TRANSITIONS, JobStatus
from windlass.storage.sql.models import Dispatcher as DispatcherRow
from windlass.storage.sql.models import Job, JobEvent, WebhookDelivery
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.webhooks import EVENT_TYPES, WebhookRepository

JOBS = "/v1/fine_tuning/jobs"
NUM_STEPS = 4  # of each job
MACHINES = ("boot-a", "boot-b")
MAX_JOBS = 5
NUM_GPUS = 2
MEMORY_GIB = 10
# Lost attempts must not end a job here.
MAX_ATTEMPTS = 1000

NewDatabase = Callable[[], AbstractContextManager[str]]


class Killed(BaseException):
    """The process is gone: no code in it catches this."""


class ServiceKilled(Exception):
    """The same for the API's process; its client lives on."""


class DatabaseOfAMortal(Database):
    """Kills the writer at the chosen write: before it is committed, or after."""

    def __init__(self, url: str, killing: type[BaseException] = Killed) -> None:
        super().__init__(url)
        self._killing = killing
        self.kill_at: int | None = None  # writes from now
        self.is_committed = False

    @contextmanager
    def write(self) -> Iterator[Session]:
        is_last = self.kill_at == 0
        if self.kill_at is not None:
            self.kill_at -= 1
        with super().write() as session:
            yield session
            if is_last and not self.is_committed:
                raise self._killing
        if is_last:
            raise self._killing


class TrainingRunners(StandInRunners):
    """Records if a job runs twice at once."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled: list[str] = []
        self.before_start: Callable[[], None] = lambda: None

    def start(self, spec: JobSpec) -> None:
        self.before_start()
        super().start(spec)
        if sum(job == spec.job for job, _ in self.alive) > 1:
            self.doubled.append(spec.job)


def expected_answer(job: Job, action: str) -> JobStatus | None:
    """The status of a job after a request; None if the request is refused."""
    if action == "resume":
        if job.status is JobStatus.PAUSING:
            return None if job.cancel_requested else JobStatus.RUNNING
        ready = JobStatus.QUEUED if job.hyperparameters is not None else JobStatus.VALIDATING_FILES
        return ready if job.status is JobStatus.PAUSED else None
    if job.status in TERMINAL_STATUSES:
        return None
    if action == "cancel":
        return job.status if job.status in (JobStatus.RUNNING, JobStatus.PAUSING) else JobStatus.CANCELLED
    if job.status is JobStatus.RUNNING:
        return None if job.cancel_requested else JobStatus.PAUSING
    return {JobStatus.PAUSING: JobStatus.PAUSING, JobStatus.PAUSED: None}.get(job.status, JobStatus.PAUSED)


class LifeCycle(RuleBasedStateMachine):
    """`new_database`: makes one of the tested kind, with all tables and no rows.

    `client`: of an app for all examples.
    """

    new_database: NewDatabase
    client: TestClient
    num_made_room = 0  # how often a job was preempted, in all examples

    def __init__(self) -> None:
        super().__init__()
        self._open = ExitStack()
        url = self._open.enter_context(self.new_database())
        home = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="windlass-life-")))
        self.people = self._opened(DatabaseOfAMortal(url, ServiceKilled))
        self.stage = Stage(home / "home", self.people, max_attempts=MAX_ATTEMPTS, num_gpus=NUM_GPUS)
        make_model(self.stage.settings.models_dir / "tiny")
        context = replace(context_of(self.client), settings=self.stage.settings, database=self.people)
        self.client.app.state.context = context  # type: ignore[attr-defined]
        self.file_id = upload(self.client)
        self.runners = self.stage.runners = TrainingRunners()
        self._databases = [self._opened(DatabaseOfAMortal(url)) for _ in MACHINES]
        self.dispatchers: list[Dispatcher] = [self._made(index) for index in range(len(MACHINES))]
        self.jobs: list[str] = []
        self.gib: dict[str, int] = {}  # GiB of memory that each needs
        self.steps: dict[str, int] = {}  # committed steps of each
        self.fruitful: set[tuple[str, int]] = set()  # attempts that have committed a step
        self.may_fail: set[str] = set()
        self.may_be_cancelled: set[str] = set()

    def _opened(self, database: DatabaseOfAMortal) -> DatabaseOfAMortal:
        self._open.callback(database.close)
        return database

    def _made(self, index: int) -> Dispatcher:
        """A new process on a machine whose former one is dead."""
        database = self._databases[index]
        database.kill_at = None
        return self.stage.make_dispatcher(is_alone=True, database=database, machine=MACHINES[index])

    # --- users ------------------------------------------------------------------------------------------------------

    @initialize(waiting=st.lists(st.tuples(st.integers(-1, 1), st.integers(1, MEMORY_GIB)), max_size=3))
    def two_dispatchers_begin(self, waiting: list[tuple[int, int]]) -> None:
        with self.people.write() as session:
            url = "https://example.com"
            WebhookRepository(session).add(name="all", url=url, event_types=EVENT_TYPES, secret="sealed")
        for priority, gib in waiting:
            self.create(priority, gib, True)
        for index in range(len(MACHINES)):
            self.dispatch(index, None, False)

    @rule(
        priority=st.integers(-1, 1),
        gib=st.integers(1, MEMORY_GIB),
        is_prepared=st.booleans(),
        dies=st.sampled_from([None, "before", "after"]),
    )
    def create(self, priority: int, gib: int, is_prepared: bool, dies: str | None = None) -> None:
        """Creates a job. If the service dies at the write, the request is sent again."""
        if len(self.jobs) == MAX_JOBS:
            return
        settings = {"epochs": 2, "batch_size": 5, "sequence_length": 64, "priority": priority}
        body = {"model": "tiny", "training_file": self.file_id, "windlass": settings}
        headers = {"Idempotency-Key": str(len(self.jobs))}
        with self._dying(dies):
            response = self.client.post(JOBS, json=body, headers=headers)
        if dies is not None:
            assert response.status_code == 500
            response = self.client.post(JOBS, json=body, headers=headers)
        assert response.status_code == 200, response.text
        job_id = response.json()["id"]
        self.jobs.append(job_id)
        self.steps[job_id], self.gib[job_id] = 0, gib
        if is_prepared:
            self.stage.prepare_at_once(job_id, planned(gib, buffers_gib=gib))

    @rule(
        action=st.sampled_from(["cancel", "pause", "resume"]),
        which=st.integers(0, MAX_JOBS - 1),
        dies=st.sampled_from([None, "before", "after"]),
    )
    def ask(self, action: str, which: int, dies: str | None) -> None:
        """Makes a request about a job.

        The service may die at the write; the answer must match the job's status afterwards.
        """
        if not self.jobs:
            return
        job_id = self.jobs[which % len(self.jobs)]
        before = self.stage.job(job_id)
        expected = expected_answer(before, action)
        with self._dying(None if expected is None else dies):
            response = self.client.post(f"{JOBS}/{job_id}/{action}")
        after = self.stage.job(job_id).status
        if expected is None:
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_state")
            assert after is before.status
            return
        assert after is (before.status if dies == "before" else expected)
        if dies is None:
            assert (response.status_code, response.json()["status"]) == (200, expected)
        if action == "cancel" and dies != "before":
            self.may_be_cancelled.add(job_id)

    @contextmanager
    def _dying(self, dies: str | None) -> Iterator[None]:
        self.people.kill_at, self.people.is_committed = None if dies is None else 0, dies == "after"
        yield
        self.people.kill_at = None

    # --- dispatchers ------------------------------------------------------------------------------------------------

    @rule(index=st.integers(0, 1), kill_at=st.none() | st.integers(0, 6), is_committed=st.booleans())
    def dispatch(self, index: int, kill_at: int | None, is_committed: bool) -> None:
        """Runs a pass. The process may be killed at one of its writes."""
        self._databases[index].kill_at, self._databases[index].is_committed = kill_at, is_committed
        buffers = {job_id: self.gib[job_id] * GIB for job_id, _ in self.runners.alive}
        room_nbytes = MEMORY_GIB * GIB - sum(buffers.values())
        self.stage.box = MachineCapacity(host_nbytes=MEMORY_GIB * GIB, room_nbytes=room_nbytes, buffers=buffers)
        try:
            self.dispatchers[index].tick()
        except Killed:
            for preparation in self.stage.preparations:
                if preparation.made_for is self._databases[index]:
                    preparation.stopped = True
            self.dispatchers[index] = self._made(index)
        self._databases[index].kill_at = None

    @rule(index=st.integers(0, 1))
    def freeze(self, index: int) -> None:
        """Freezes a dispatcher until the other one takes over."""
        for _ in range(int(LEASE_S / BEAT_S) + 3):
            self.pass_time(BEAT_S)
            self.dispatch(1 - index, None, False)

    @rule(index=st.integers(0, 1))
    def freeze_as_a_job_is_launched(self, index: int) -> None:
        def freeze() -> None:
            self.runners.before_start = lambda: None
            self.freeze(index)

        self.runners.before_start = freeze
        self.dispatch(index, None, False)
        self.runners.before_start = lambda: None

    @rule(seconds=st.sampled_from([1.0, BEAT_S, 400.0]))
    def pass_time(self, seconds: float) -> None:
        """Moves all clocks. Runners give signs of life meanwhile."""
        self.stage.now += seconds
        with self.people.write() as session:
            session.execute(update(DispatcherRow).values(expires_at=DispatcherRow.expires_at - seconds))
        for job_id, attempt in self.runners.alive:
            tell_alive(self.stage.settings.jobs_dir / job_id, Attempt(attempt))

    @rule(which=st.integers(0, MAX_JOBS - 1), is_usable=st.booleans())
    def end_preparation(self, which: int, is_usable: bool) -> None:
        living = [each for each in self.stage.preparations if each.ending is None and not each.stopped]
        if living:
            preparation = living[which % len(living)]
            job_id = preparation.order.work_dir.parent.name
            prepared = planned(self.gib[job_id], buffers_gib=self.gib[job_id])
            preparation.ending = prepared if is_usable else PreparationError("invalid_file", "it is empty")
            if not is_usable:
                self.may_fail.add(job_id)

    # --- runners ----------------------------------------------------------------------------------------------------

    @rule(
        which=st.integers(0, MAX_JOBS - 1),
        does=st.sampled_from(["train", "train", "train", "die", "interrupt", "fail"]),
    )
    def run(self, which: int, does: str) -> None:
        alive = sorted(self.runners.alive)
        if not alive:
            return
        job_id, attempt = alive[which % len(alive)]
        with self._journal(job_id, attempt) as journal:
            if does == "train":
                self._train(job_id, attempt, journal)
                return
            if does == "interrupt":
                journal.append_outcome(INTERRUPTED, "lost", {"code": "process_lost", "message": "lost", "param": None})
            elif does == "fail":
                self.may_fail.add(job_id)
                journal.append_outcome("failed", "broken", {"code": "broken", "message": "broken", "param": None})
        self.runners.alive.remove((job_id, attempt))

    def _train(self, job_id: str, attempt: int, journal: Journal) -> None:
        """Trains a step, or ends as requested."""
        if (job_id, attempt) in self.runners.cancelled:
            journal.append_outcome("cancelled", "The job was cancelled")
        elif self.steps[job_id] == NUM_STEPS:
            spec = next(spec for spec in self.runners.started if (spec.job, spec.attempt) == (job_id, attempt))
            Path(spec.output_dir).mkdir(exist_ok=True)
            Path(spec.output_dir, "config.json").write_text("{}")
            journal.append_outcome("succeeded", "The model is ready")
        elif (job_id, attempt) in self.runners.paused:
            journal.append_outcome(PAUSED, "The attempt ended after a commit")
        else:
            self.steps[job_id] += 1
            step = self.steps[job_id]
            self.fruitful.add((job_id, attempt))
            journal.append("metrics", f"Step {step}", step=step, total_steps=NUM_STEPS, train_loss=1.0 / step)
            return
        self.runners.alive.remove((job_id, attempt))

    @contextmanager
    def _journal(self, job_id: str, attempt: int) -> Iterator[Journal]:
        journal = self.stage.journal(job_id, attempt)
        yield journal
        journal.close()

    @rule()
    def one_of_higher_priority_comes_that_needs_everything(self) -> None:
        """Attempts that have begun train a step first, because only an attempt with progress is preempted."""
        for job_id, attempt in sorted(self.runners.alive):
            if (job_id, attempt) not in self.fruitful:
                with self._journal(job_id, attempt) as journal:
                    self._train(job_id, attempt, journal)
        self.create(-1, MEMORY_GIB, True)
        for index in range(len(MACHINES)):
            self.dispatch(index, None, False)

    # --- order of jobs ----------------------------------------------------------------------------------------------

    @rule()
    def nobody_runs_in_the_place_of_a_job_of_higher_priority_once_things_settle(self) -> None:
        """Checks the order of running jobs once nothing new arrives.

        The only events are the first step of each attempt, and the end of those that were asked to end.
        """
        for _ in range(6):
            for index in range(len(MACHINES)):
                self.dispatch(index, None, False)
            told = {*self.runners.paused, *self.runners.cancelled}
            for job_id, attempt in sorted(self.runners.alive):
                if (job_id, attempt) in told or (job_id, attempt) not in self.fruitful:
                    with self._journal(job_id, attempt) as journal:
                        self._train(job_id, attempt, journal)
        jobs = [self.stage.job(job_id) for job_id in self.jobs]
        queued = [job for job in jobs if job.status is JobStatus.QUEUED]
        if not queued or any("was lost" in str(job.waiting_reason) for job in queued):
            return
        first = min(queued, key=lambda job: (job.priority, job.attempt == 0, job.created_at, job.id))
        running = [job for job in jobs if job.status is JobStatus.RUNNING]
        lower = [job for job in running if job.priority > first.priority]
        if any((job.id, job.attempt) not in self.fruitful for job in lower):
            return
        for gone in ([], *([job] for job in lower)):
            stays = [self.gib[job.id] for job in running if job not in gone]
            assert len(stays) == NUM_GPUS or sum(stays) + self.gib[first.id] > MEMORY_GIB, self._told_of(first.id)

    def _told_of(self, job_id: str) -> str:
        return f"{self.stage.job(job_id).waiting_reason}: {self.stage.messages(job_id)}"

    @invariant()
    def no_more_is_given_than_there_is(self) -> None:
        assert len(self.runners.alive) <= NUM_GPUS
        assert sum(self.gib[job_id] for job_id, _ in self.runners.alive) <= MEMORY_GIB

    # --- invariants -------------------------------------------------------------------------------------------------

    @invariant()
    def the_api_shows_every_job_once_and_as_it_is(self) -> None:
        shown = self.client.get(JOBS, params={"limit": 100}).json()["data"]
        assert sorted((job["id"], job["status"]) for job in shown) == sorted(
            (job_id, self.stage.status(job_id).value) for job_id in self.jobs
        )

    @invariant()
    def no_job_runs_twice_at_once(self) -> None:
        assert self.runners.doubled == []

    @invariant()
    def every_status_follows_from_the_one_before(self) -> None:
        for job_id in self.jobs:
            job = self.stage.job(job_id)
            told = [JobStatus(event.data["status"]) for event in self._events(job_id) if "status" in event.data]
            assert told[0] is JobStatus.VALIDATING_FILES
            assert told[-1] is job.status
            for before, after in pairwise(told):
                assert after in TRANSITIONS[before]

    @invariant()
    def what_is_told_elsewhere_is_told_once(self) -> None:
        with self.people.read() as session:
            bodies = [json.loads(row.body) for row in session.scalars(select(WebhookDelivery))]
        statuses = {job_id: self.stage.status(job_id) for job_id in self.jobs}
        ended = [
            (job_id, f"fine_tuning.job.{status}") for job_id, status in statuses.items() if status in TERMINAL_STATUSES
        ]
        assert sorted((body["data"]["id"], body["type"]) for body in bodies) == sorted(ended)

    @invariant()
    def what_runners_told_is_taken_in_once_and_in_order(self) -> None:
        for job_id in self.jobs:
            told = [(each.attempt, each.seq) for each in self._told(job_id) if each.kind != "outcome"]
            taken = [(event.attempt, event.seq) for event in self._events(job_id) if event.seq is not None]
            assert taken == told[: len(taken)]

    # --- the end ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self._finish()
        finally:
            self._open.close()

    def _finish(self) -> None:
        """From now on nothing goes wrong: every job comes to its end."""
        for _ in range(100):
            statuses = {job_id: self.stage.status(job_id) for job_id in self.jobs}
            if all(status in TERMINAL_STATUSES for status in statuses.values()) and not self.runners.alive:
                break
            for job_id, status in statuses.items():
                if status is JobStatus.PAUSED:
                    self.stage.request_resume(job_id)
            self.end_preparation(0, True)
            for which in range(len(self.runners.alive)):
                self.run(which, "train")
            for _ in range(5):  # otherwise the idle dispatcher would be taken for dead again and again
                self.pass_time(LEASE_S * 2 / 3)
                for index in range(len(MACHINES)):
                    self.dispatch(index, None, False)
        for job_id in self.jobs:
            job = self.stage.job(job_id)
            allowed = {JobStatus.SUCCEEDED}
            allowed |= {JobStatus.FAILED} if job_id in self.may_fail else set()
            allowed |= {JobStatus.CANCELLED} if job_id in self.may_be_cancelled else set()
            assert job.status in allowed, f"{job.status}, of {allowed}: {self.stage.messages(job_id)}"
            if job.status is JobStatus.SUCCEEDED:
                with self.people.read() as session:
                    steps = [row.step for row in EventRepository(session).metrics(job_id)]
                assert steps == list(range(1, NUM_STEPS + 1))
                assert len(self._told(job_id)) == len([e for e in self._events(job_id) if e.seq is not None]) + len(
                    [each for each in self._told(job_id) if each.kind == "outcome"]
                )
        assert not self.runners.alive
        self.what_is_told_elsewhere_is_told_once()
        told = [message for job_id in self.jobs for message in self.stage.messages(job_id)]
        type(self).num_made_room += sum("of higher priority; it goes on by itself" in message for message in told)

    def _events(self, job_id: str) -> list[JobEvent]:
        with self.people.read() as session:
            return list(EventRepository(session).since(0, limit=10_000, job_id=job_id))

    def _told(self, job_id: str) -> list[JournalRecord]:
        return list(read_journal(self.stage.settings.jobs_dir / job_id / "journal.jsonl"))


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> NewDatabase:
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgresql")
        return lambda: server.new_database(migrated=True)
    template = tmp_path / "template.db"
    migrate(f"sqlite:///{template}")

    @contextmanager
    def copied() -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="windlass-life-") as folder:
            shutil.copy(template, Path(folder, "windlass.db"))
            yield f"sqlite:///{folder}/windlass.db"

    return copied


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with serve(Settings(home=tmp_path / "app", measure=False)) as client:
        yield client


def _run(
    new_database: NewDatabase, client: TestClient, *, num_examples: int, num_steps: int, is_fixed: bool
) -> type[LifeCycle]:
    """`is_fixed`: use the same examples each time, and report the first failing one without shrinking."""
    machine = type("LifeCycleOnADatabase", (LifeCycle,), {"new_database": staticmethod(new_database), "client": client})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            database=None,
            derandomize=is_fixed,
            phases=[Phase.generate] if is_fixed else list(Phase),
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine


def test_no_job_is_lost_doubled_or_led_astray(new_database: NewDatabase, client: TestClient) -> None:
    assert _run(new_database, client, num_examples=2, num_steps=25, is_fixed=True).num_made_room > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_job_is_lost_doubled_or_led_astray_for_long(new_database: NewDatabase, client: TestClient) -> None:
    assert _run(new_database, client, num_examples=200, num_steps=60, is_fixed=False).num_made_room > 0
