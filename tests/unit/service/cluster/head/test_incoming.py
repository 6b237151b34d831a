"""Uploads on the head: a checkpoint that was just placed stays, and what no job needs is removed."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from tests.support.service.cluster_stage import Cluster
from windlass.service.cluster.box.connection import HeadRefused
from windlass.service.cluster.head import incoming
from windlass.service.cluster.head.process import tidy_uploads
from windlass.service.machine.fleet.content import ContentFile, ResultFolder, Where, model_name
from windlass.storage.files.locks import open_lock_file, try_lock
from windlass.storage.sql.repositories.boxes import BoxRepository, Instruction, MirrorRepository


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


def test_tidy_uploads_of_a_cancelled_job_of_a_removed_box_removes_them(cluster: Cluster, upload: Upload) -> None:
    head = cluster.head
    upload.put(upload.file(b"whole"), b"wh")
    tidy_uploads(head.settings, head.database)
    assert [path.suffix for path in upload.folder.iterdir()] == [".partial"]
    with head.database.write() as session:
        BoxRepository(session).remove(cluster.row.id, head=head.node)
    with head.database.write() as session:
        MirrorRepository(session).request(Instruction.CANCEL, upload.job_id, here=head.node)
    tidy_uploads(head.settings, head.database)
    assert not upload.folder.exists()


def test_tidy_uploads_of_a_job_that_is_given_to_a_box_meanwhile_keeps_what_came_since(
    cluster: Cluster, upload: Upload
) -> None:
    def find_jobs() -> set[str]:
        upload.put(upload.file(b"{}"), b"{}")
        return set()

    cluster.incoming.forget_all_but(find_jobs)
    assert upload.folder.exists()


@pytest.mark.parametrize("is_placed", [False, True])
def test_upload_of_the_next_checkpoint_removes_incomplete_files_of_abandoned_ones(
    upload: Upload, is_placed: bool
) -> None:
    abandoned, busy, whole = upload.file(b"abandoned"), upload.file(b"busy"), upload.file(b"{}")
    if is_placed:
        upload.put(whole, b"{}")
    upload.folder.mkdir(parents=True, exist_ok=True)
    (upload.folder / f"{abandoned.sha256}.partial").write_bytes(b"ab")
    fd = open_lock_file(upload.folder / f"{busy.sha256}.partial")
    try:
        assert try_lock(fd)
        if is_placed:
            upload.place(whole)
        else:
            upload.put(whole, b"{}")
    finally:
        os.close(fd)
    assert {path.name for path in upload.folder.iterdir()} == {f"{busy.sha256}.partial", whole.sha256}


def test_upload_whose_file_is_removed_before_it_is_locked_is_repeated(
    upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real = upload.file(b"whole"), incoming.open_lock_file

    def open_and_remove(path: Path) -> int:
        fd = real(path)
        path.unlink()
        return fd

    monkeypatch.setattr(incoming, "open_lock_file", open_and_remove)
    with pytest.raises(HeadRefused) as refusal:
        upload.put(file, b"whole")
    assert refusal.value.code == "busy"
    monkeypatch.setattr(incoming, "open_lock_file", real)
    upload.put(file, b"whole")
