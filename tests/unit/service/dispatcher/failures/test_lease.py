"""Dispatchers that take over from each other, with clocks that the test moves."""

import threading
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from tests.support.service.dispatcher_stage import PREPARED, Stage
from windlass.service.dispatcher.lease import BEAT_S, HANGS_S, LEASE_S, Lease
from windlass.service.installation.home import DispatcherLock, node_of
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.job_status import JobStatus


class Clock:
    """Seconds, moved by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lease(database: Database, clock: Clock, *, machine: str = "boot-1", is_alone: bool = False) -> Lease:
    made = Lease(database, node="node-a", machine=machine, is_alone=is_alone, clock=clock)
    assert made.renew()
    return made


def pass_time(database: Database, clock: Clock, seconds: float, *living: Lease) -> list[bool]:
    """Moves all clocks. Returns, for each renewal, whether the lease took over from another one."""
    changes = []
    until = clock.now + seconds
    while clock.now < until:
        step = min(until - clock.now, BEAT_S)
        clock.now += step
        with database.write() as session:
            # The database's own clock moves too, which shortens the rest of each term.
            session.execute(text(f"UPDATE dispatchers SET expires_at = expires_at - {step}"))
        changes += [each.renew() for each in living]
    return changes


def test_a_dispatcher_that_gives_no_sign_is_taken_for_dead(database: Database, clock: Clock) -> None:
    silent, other = lease(database, clock), lease(database, clock)
    assert not any(pass_time(database, clock, LEASE_S - 1, other))
    assert any(pass_time(database, clock, BEAT_S + 2, other))
    before = silent.holder
    assert silent.renew()
    assert silent.holder != before
    assert not any(pass_time(database, clock, LEASE_S * 2, silent, other))


def test_time_without_renewals_counts_only_with_a_shared_clock(tmp_path: Path, clock: Clock) -> None:
    """Both may have been frozen, or their machine asleep."""
    url = f"sqlite:///{tmp_path}/windlass.db"
    migrate(url)
    database = Database(url)
    _, other = lease(database, clock), lease(database, clock)
    clock.now += 10 * LEASE_S
    assert not other.renew()
    assert not any(pass_time(database, clock, LEASE_S, other))
    assert any(pass_time(database, clock, BEAT_S, other))
    database.close()


def test_only_dispatcher_of_a_home_takes_over_at_once(database: Database, clock: Clock) -> None:
    dead, elsewhere = lease(database, clock), lease(database, clock, machine="boot-2")
    lease(database, clock, is_alone=True)
    clock.now += BEAT_S
    assert dead.renew()  # its counter did not move: it is no longer in the table
    assert not elsewhere.renew()


def test_a_long_pass_gives_signs_of_life_and_one_without_end_does_not(database: Database, clock: Clock) -> None:
    busy, other = lease(database, clock), lease(database, clock)
    for _ in range(20):
        busy.beat()
        assert not any(pass_time(database, clock, BEAT_S, other))
    clock.now += HANGS_S
    changes = []
    for _ in range(20):
        busy.beat()
        changes += pass_time(database, clock, BEAT_S, other)
    assert any(changes)


def test_dispatcher_that_ends_releases_its_jobs_at_once(database: Database, clock: Clock) -> None:
    ending, other = lease(database, clock), lease(database, clock)
    ending.give_up()
    ending.give_up()
    clock.now += BEAT_S
    assert not other.renew()  # no dispatcher had to be taken for dead
    assert ending.renew()


def test_a_thread_gives_signs_even_where_the_database_does_not_answer_once(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, ended, seen = lease(database, clock), threading.Event(), []

    def beat() -> None:
        seen.append(1)
        if len(seen) == 1:
            raise OperationalError("", None, Exception("database is locked"))
        ended.set()

    monkeypatch.setattr("windlass.service.dispatcher.lease.BEAT_S", 0.01)
    monkeypatch.setattr(kept, "beat", beat)
    kept.beat_until(ended)
    assert len(seen) == 2


def test_a_home_keeps_its_name(tmp_path: Path) -> None:
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.append(node_of(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(names) == {node_of(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == ["node"]


def test_one_dispatcher_at_a_time_has_a_home(tmp_path: Path) -> None:
    first, second = DispatcherLock(tmp_path), DispatcherLock(tmp_path)
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()


# --- dispatchers ------------------------------------------------------------------------------------------------------


def test_two_dispatchers_prepare_and_run_a_job_once(stage: Stage) -> None:
    other = stage.make_dispatcher(is_alone=False)
    job_id = stage.submit()
    for _ in range(3):
        stage.tick()
        other.tick()
    assert len(stage.preparations) == 1
    stage.preparations[0].ending = PREPARED
    for _ in range(3):
        other.tick()
        stage.tick()
    assert [spec.job for spec in stage.runners.started] == [job_id]
    # The use of the machine is counted, whichever dispatcher holds the jobs.
    stage.dispatcher.close()
    stage.submit()
    other.tick()
    assert stage.job(job_id).status is JobStatus.RUNNING
    assert len(stage.preparations) == 2


def test_another_dispatcher_goes_on_with_the_jobs_of_one_that_froze(stage: Stage) -> None:
    frozen = stage.dispatcher = stage.make_dispatcher(is_alone=False)
    job_id, journal = stage.run()
    waiting = stage.submit()
    stage.tick()
    journal.append("metrics", "Step 1", step=1, total_steps=4, train_loss=1.0)
    stage.dispatcher = stage.make_dispatcher(is_alone=False)
    stage.let_leases_expire()
    assert stage.messages(job_id).count("Step 1") == 1
    assert len(stage.preparations) == 3
    stage.preparations[2].ending = PREPARED
    stage.tick(2)
    assert stage.status(waiting) is JobStatus.QUEUED
    frozen.tick()  # its memory is out of date
    assert stage.preparations[1].stopped
    journal.append("metrics", "Step 2", step=2, total_steps=4, train_loss=0.5)
    journal.close()
    frozen.tick()
    assert stage.job(job_id).step == 1
    stage.tick()
    frozen.tick()
    assert [message for message in stage.messages(job_id) if message.startswith("Step")] == ["Step 1", "Step 2"]
    assert len(stage.runners.started) == 1
    assert stage.status(job_id) is JobStatus.RUNNING


def test_a_dispatcher_that_freezes_as_it_launches_a_job_launches_none_when_it_wakes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile another dispatcher has given that attempt up and made the next one."""
    frozen, job_id = stage.make_dispatcher(is_alone=False), stage.queue_only()
    real_start = stage.runners.start

    def freeze(spec: object) -> None:
        monkeypatch.setattr(stage.runners, "start", real_start)
        stage.dispatcher = stage.make_dispatcher(is_alone=False)
        stage.let_leases_expire()
        for _ in range(20):
            if not stage.runners.alive:
                stage.now += 1
                stage.tick()
        assert stage.runners.alive == {(job_id, 2)}
        real_start(spec)  # type: ignore[arg-type]

    monkeypatch.setattr(stage.runners, "start", freeze)
    frozen.tick()
    assert stage.runners.alive == {(job_id, 2)}
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 2)


def test_a_box_leaves_the_jobs_of_another_alone(stage: Stage) -> None:
    job_id = stage.submit(node="node-b")
    stage.tick(2)
    assert stage.preparations == []
    stage.node = "node-b"
    stage.new_dispatcher().tick()
    assert [each.order.work_dir.parent.name for each in stage.preparations] == [job_id]
