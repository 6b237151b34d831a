"""The table of files."""

import secrets
import time
from collections.abc import Iterable

from sqlalchemy import func, select, tuple_
from sqlalchemy.orm import Session

from windlass.storage.sql import File, NotFound, Page, page_of


def new_file_id() -> str:
    """Returns a new id that cannot be guessed."""
    return f"file-{secrets.token_hex(12)}"


class FileRepository:
    """Files, within the caller's transaction.

    With `only_of`, only that user's files are visible; files without an owner are not.
    """

    def __init__(self, session: Session, only_of: str | None = None) -> None:
        self._session = session
        self._only_of = only_of

    def add(
        self,
        *,
        file_id: str,
        filename: str,
        purpose: str,
        nbytes: int,
        owner: str | None = None,
        node: str | None = None,
    ) -> File:
        """Adds the row of a file whose bytes are already stored. `node`: the home that has them."""
        file = File(
            id=file_id,
            filename=filename,
            purpose=purpose,
            nbytes=nbytes,
            created_at=time.time(),
            owner=owner,
            node=node,
        )
        self._session.add(file)
        self._session.flush()
        return file

    def get(self, file_id: str) -> File:
        """Returns the file. Raises NotFound if there is none."""
        file = self._session.get(File, file_id)
        if file is None or self._only_of not in (None, file.owner):
            raise NotFound("file", file_id)
        return file

    def delete(self, file_id: str) -> str | None:
        """Deletes the file's row. The caller must remove the bytes after the commit.

        Returns the home that has the bytes, None if it is not known. Raises NotFound if there is no such file.
        """
        file = self.get(file_id)
        self._session.delete(file)
        self._session.flush()
        return file.node

    def usage(self, owner: str) -> tuple[int, int]:
        """Returns the number of a user's files, and the sum of their bytes."""
        totals = select(func.count(), func.coalesce(func.sum(File.nbytes), 0)).where(File.owner == owner)
        num_files, nbytes = self._session.execute(totals).one()
        return int(num_files), int(nbytes)

    def filenames(self, file_ids: Iterable[str | None]) -> dict[str, str]:
        """Returns the uploaders' names of the files that exist, by id."""
        ids = [file_id for file_id in file_ids if file_id is not None]
        query = select(File.id, File.filename).where(File.id.in_(ids))
        return {row.id: row.filename for row in self._session.execute(query)}

    def all_ids(self) -> frozenset[str]:
        """Returns the ids of all files."""
        query = select(File.id)
        return frozenset(
            self._session.scalars(query if self._only_of is None else query.where(File.owner == self._only_of))
        )

    def page(self, *, limit: int, after: str | None, newest_first: bool, purpose: str | None) -> Page[File]:
        """Lists files by time of upload. Raises NotFound if `after` is not a file's id."""
        position = tuple_(File.created_at, File.id)
        query = select(File).limit(limit + 1)
        if newest_first:
            query = query.order_by(File.created_at.desc(), File.id.desc())
        else:
            query = query.order_by(File.created_at, File.id)
        if self._only_of is not None:
            query = query.where(File.owner == self._only_of)
        if purpose is not None:
            query = query.where(File.purpose == purpose)
        if after is not None:
            last = self.get(after)
            bound = tuple_(last.created_at, last.id)
            query = query.where(position < bound if newest_first else position > bound)
        return page_of(self._session.scalars(query).all(), limit)
