"""Uploads on the head: a checkpoint that was just placed stays, and what no job needs is removed."""

import hashlib
import time
from pathlib import Path

import pytest

from tests.support.service.cluster_stage import Cluster
from windlass.service.cluster.head import incoming
from windlass.service.machine.fleet.content import ContentFile, ResultFolder, Where, model_name


class Upload:
    """A checkpoint of a job of the box."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.job_id = cluster.prepare()
        cluster.give(self.job_id)
        self.name = f"{model_name(cluster.head.job(self.job_id))}-step-1"
        self.target = cluster.head.settings.fine_tuned_dir / self.name
        self.folder: Path = cluster.head.settings.home / "incoming" / self.job_id

    def file(self, content: bytes, name: str = "config.json") -> ContentFile:
        digest = hashlib.sha256(content).hexdigest()
        return ContentFile(path=f"{self.name}/{name}", where=Where.FINE_TUNED, nbytes=len(content), sha256=digest)

    def put(self, file: ContentFile, part: bytes) -> None:
        self.cluster.link.put(self.job_id, file, 0, [part])

    def place(self, *files: ContentFile) -> None:
        folder = ResultFolder(where=Where.FINE_TUNED, folder=self.name, files=files)
        self.cluster.link.complete(self.job_id, folder)


@pytest.fixture
def upload(cluster: Cluster) -> Upload:
    return Upload(cluster)


def test_remove_unused_checkpoint_that_is_being_placed_stays_and_waits_for_nothing(
    cluster: Cluster, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = upload.file(b"{}")
    upload.put(file, b"{}")
    sync_tree = incoming.sync_tree

    def remove_meanwhile(path: Path) -> None:
        upload.target.mkdir()
        cluster.incoming.remove_unused(upload.name, since=time.monotonic())
        assert upload.target.exists()
        sync_tree(path)

    monkeypatch.setattr(incoming, "sync_tree", remove_meanwhile)
    upload.place(file)
    assert (upload.target / "config.json").exists()


def test_remove_unused_checkpoint_that_was_placed_since_stays(cluster: Cluster, upload: Upload) -> None:
    file = upload.file(b"{}")
    upload.put(file, b"{}")
    upload.place(file)
    since = time.monotonic()
    upload.place(file)  # saved again with equal content, while the report without the earlier one is read
    cluster.incoming.remove_unused(upload.name, since=since)
    assert upload.target.exists()
    cluster.incoming.remove_unused(upload.name, since=time.monotonic())
    assert not upload.target.exists()
    upload.place(file)  # its contents are still here
    assert upload.target.exists()
