"""The files table."""

import pytest

from windlass.storage.sql.database import Database
from windlass.storage.sql.errors import NotFound
from windlass.storage.sql.repositories.files import FileRepository, new_file_id


def add(database: Database, name: str, purpose: str = "fine-tune") -> str:
    with database.write() as session:
        file = FileRepository(session).add(file_id=new_file_id(), filename=name, purpose=purpose, nbytes=3)
        return file.id


def test_pages_in_both_orders(database: Database) -> None:
    ids = [add(database, f"{index}.jsonl") for index in range(5)]
    results = add(database, "results.csv", "fine-tune-results")
    with database.read() as session:
        files = FileRepository(session)
        first = files.page(limit=2, after=None, newest_first=False, purpose="fine-tune")
        rest = files.page(limit=9, after=first.rows[-1].id, newest_first=False, purpose="fine-tune")
        assert [file.id for file in (*first.rows, *rest.rows)] == ids
        assert (first.has_more, rest.has_more) == (True, False)
        newest = files.page(limit=9, after=None, newest_first=True, purpose=None)
        assert [file.id for file in newest.rows] == [results, *ids[::-1]]
        after = files.page(limit=9, after=ids[2], newest_first=True, purpose=None)
        assert [file.id for file in after.rows] == [ids[1], ids[0]]


def test_delete(database: Database) -> None:
    file_id = add(database, "a.jsonl")
    with database.write() as session:
        FileRepository(session).delete(file_id)
    with pytest.raises(NotFound, match=file_id), database.write() as session:
        FileRepository(session).delete(file_id)
