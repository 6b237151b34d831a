import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service.cluster_stage import Cluster
from tests.support.service.spread_stage import Spread
from windlass.storage.sql.database import Database


@pytest.fixture
def databases(tmp_path: Path, migrated_file: Path) -> Iterator[tuple[Database, Database]]:
    """The databases of a head and of a box."""
    for name in ("head.db", "box.db"):
        shutil.copyfile(migrated_file, tmp_path / name)
    head, box = (Database(f"sqlite:///{tmp_path / name}") for name in ("head.db", "box.db"))
    yield head, box
    head.close()
    box.close()


@pytest.fixture
def cluster(tmp_path: Path, databases: tuple[Database, Database]) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, *databases)
    yield cluster
    cluster.close()


@pytest.fixture
def spread(tmp_path: Path, databases: tuple[Database, Database]) -> Iterator[Spread]:
    spread = Spread(tmp_path, *databases)
    yield spread
    spread.head.dispatcher._spread.close()
    spread.close()
