"""The table of what users' jobs leave on disks. With it a request knows what a user has stored without a walk."""

from collections.abc import Collection
from dataclasses import asdict, dataclass

from sqlalchemy import Delete, delete, func, insert, select
from sqlalchemy.orm import Session

from windlass.storage.sql import DeletedJob, Job, StoredThing


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One thing that a job has left, such as a model's folder."""

    kind: str
    name: str
    job_id: str
    owner: str  # the job's user
    nbytes: int


class StoredRepository:
    """Reads and writes the sizes, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def nbytes_of(self, owner: str) -> int:
        """Returns what the jobs of a user have left, as it was last measured."""
        total = select(func.coalesce(func.sum(StoredThing.nbytes), 0)).where(StoredThing.owner == owner)
        return int(self._session.execute(total).scalar_one())

    def owners(self) -> dict[str, str]:
        """Returns the users of all jobs that have one, deleted jobs included, by the jobs' ids."""
        there = select(Job.id, Job.owner).where(Job.owner.is_not(None))
        deleted = select(DeletedJob.id, DeletedJob.owner).where(DeletedJob.owner.is_not(None))
        return {row.id: row.owner for row in self._session.execute(there.union_all(deleted))}

    def replace(self, node: str, found: Collection[Stored]) -> None:
        """Writes what was found in a home, and forgets what is there no more. Unchanged rows are not written."""
        known = {(row.kind, row.name): (row.node, row.nbytes) for row in self._session.scalars(select(StoredThing))}
        for each in found:
            before = known.pop((each.kind, each.name), None)
            if before == (node, each.nbytes):
                continue
            if before is not None:
                self._session.execute(_forgotten(each.kind, each.name))
            self._session.execute(insert(StoredThing).values(**asdict(each), node=node))
        for (kind, name), (where, _) in known.items():
            if where == node:
                self._session.execute(_forgotten(kind, name))

    def forget_job(self, job_id: str, *, but: str | None = None) -> None:
        """Forgets what a deleted job had left, except for the model named `but`."""
        query = delete(StoredThing).where(StoredThing.job_id == job_id)
        self._session.execute(query if but is None else query.where(StoredThing.name != but))

    def forget_model(self, name: str) -> None:
        """Forgets a deleted model or checkpoint."""
        self._session.execute(delete(StoredThing).where(StoredThing.name == name))


def _forgotten(kind: str, name: str) -> Delete:
    return delete(StoredThing).where(StoredThing.kind == kind, StoredThing.name == name)
