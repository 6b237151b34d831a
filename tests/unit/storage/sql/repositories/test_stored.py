"""The table of what users' jobs leave on disks."""

from tests.support.service.keyed import new_job
from windlass.storage.sql.database import Database
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.stored import Stored, StoredRepository


def thing(name: str, nbytes: int, *, kind: str = "model", job_id: str = "ftjob-1", owner: str = "ann") -> Stored:
    return Stored(kind=kind, name=name, job_id=job_id, owner=owner, nbytes=nbytes)


def put(database: Database, *things: Stored, node: str = "node-1") -> None:
    with database.write() as session:
        StoredRepository(session).replace(node, things)


def nbytes_of(database: Database, owner: str = "ann") -> int:
    with database.read() as session:
        return StoredRepository(session).nbytes_of(owner)


def test_what_is_there_no_more_is_forgotten_and_what_changed_is_written(database: Database) -> None:
    assert nbytes_of(database) == 0
    put(database, thing("a", 2**40), thing("b", 3), thing("c", 5, owner="bob"))
    assert (nbytes_of(database), nbytes_of(database, "bob")) == (2**40 + 3, 5)
    put(database, thing("b", 7), thing("ftjob-1", 11, kind="job"), thing("ftjob-1", 13, kind="states"))
    assert (nbytes_of(database), nbytes_of(database, "bob")) == (31, 0)


def test_each_home_writes_its_own(database: Database) -> None:
    put(database, thing("a", 1))
    put(database, thing("b", 2), node="node-2")
    assert nbytes_of(database) == 3
    put(database)
    assert nbytes_of(database) == 2
    put(database, thing("b", 4), node="node-3")  # it has moved there
    put(database, node="node-2")
    assert nbytes_of(database) == 4


def test_deleted_jobs_and_models_are_forgotten(database: Database) -> None:
    put(
        database,
        thing("ftjob-1", 1, kind="job"),
        thing("m", 2),
        thing("m-step-1", 4, kind="checkpoint"),
        thing("m-step-2", 8, kind="checkpoint"),
        thing("other", 16, job_id="ftjob-2"),
    )
    with database.write() as session:
        StoredRepository(session).forget_model("m-step-2")
    assert nbytes_of(database) == 23
    with database.write() as session:
        StoredRepository(session).forget_job("ftjob-1", but="m")
    assert nbytes_of(database) == 18
    with database.write() as session:
        StoredRepository(session).forget_job("ftjob-1")
    assert nbytes_of(database) == 16


def test_owners_are_those_of_jobs_with_one(database: Database) -> None:
    with database.write() as session:
        jobs = JobRepository(session)
        own = jobs.create(new_job("file-1", "ann")).id
        jobs.create(new_job("file-1", None))
    with database.read() as session:
        assert StoredRepository(session).owners() == {own: "ann"}
