import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service.cluster_stage import Cluster
from windlass.storage.sql.database import Database


@pytest.fixture
def cluster(tmp_path: Path, migrated_file: Path) -> Iterator[Cluster]:
    databases = []
    for name in ("head.db", "box.db"):
        shutil.copyfile(migrated_file, tmp_path / name)
        databases.append(Database(f"sqlite:///{tmp_path / name}"))
    cluster = Cluster(tmp_path, *databases)
    yield cluster
    cluster.close()
    for database in databases:
        database.close()
