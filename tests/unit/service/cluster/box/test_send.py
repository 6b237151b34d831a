"""Uploads of results: a file that changes on its way is given up, and is sent anew with the next try."""

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.service.cluster_stage import Cluster
from windlass.service.cluster.box import send
from windlass.service.cluster.box.connection import HeadRefused, HeadUnreachable
from windlass.service.cluster.box.send import Sender
from windlass.service.machine.fleet.content import ContentFile, model_name
from windlass.storage.cancellation import CancelToken
from windlass.storage.files.file_hashes import FileChangedError

_MOST_PUTS = 30


class Model:
    """A model of a job of the box, and the link that sends it."""

    def __init__(self, cluster: Cluster) -> None:
        self.job_id = cluster.prepare()
        cluster.give(self.job_id)
        self.name = model_name(cluster.head.job(self.job_id))
        self.weights = cluster.box.settings.fine_tuned_dir / self.name / "model.safetensors"
        self.weights.parent.mkdir()
        (self.weights.parent / "config.json").write_text("{}")
        self.weights.write_bytes(b"a" * 5000)
        self.placed = cluster.head.settings.fine_tuned_dir / self.name / "model.safetensors"
        self.sender = Sender(settings=cluster.box.settings, link=cluster.link)
        self.num_puts = 0
        put = cluster.link.put

        def counted(job: str, file: ContentFile, offset: int, body: object) -> int:
            self.num_puts += 1
            assert self.num_puts <= _MOST_PUTS, "the upload is endless"
            return put(job, file, offset, body)  # type: ignore[arg-type]

        cluster.link.put = counted  # type: ignore[method-assign, assignment]

    def send(self) -> None:
        self.sender.send_model(self.job_id, self.name, cancel=CancelToken())


@pytest.fixture
def model(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(send, "_PART_NBYTES", 2000)
    monkeypatch.setattr(send, "_BLOCK_NBYTES", 1000)
    return Model(cluster)


def change_once(cluster: Cluster, weights: Path, change: Callable[[Path], object]) -> None:
    """Changes a file after its digest was computed, and before it is sent."""
    offset, changes = cluster.link.offset, [change]

    def changed(job: str, file: ContentFile) -> int:
        if file.path.endswith(weights.name) and changes:
            changes.pop()(weights)
        return offset(job, file)

    cluster.link.offset = changed  # type: ignore[method-assign]


@pytest.mark.parametrize("content", [b"short", b"b" * 5000, b"longer" * 5000])
def test_send_file_that_changed_after_its_digest_raises_and_the_next_try_sends_it(
    cluster: Cluster, model: Model, content: bytes
) -> None:
    change_once(cluster, model.weights, lambda path: path.write_bytes(content))
    with pytest.raises(FileChangedError, match="changed while it was sent"):
        model.send()
    assert not model.sender.has_sent(model.job_id, model.name)
    model.send()
    assert model.placed.read_bytes() == content


def test_send_file_with_a_stale_digest_in_the_cache_computes_it_anew(cluster: Cluster, model: Model) -> None:
    def rewrite(path: Path) -> None:
        stat = path.stat()
        path.write_bytes(b"b" * 5000)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a write within one tick of the file system's clock

    change_once(cluster, model.weights, rewrite)
    with pytest.raises(FileChangedError, match="changed while it was sent"):
        model.send()
    model.send()
    assert model.placed.read_bytes() == b"b" * 5000


@pytest.mark.parametrize("code", [None, "busy"])
def test_send_upload_without_progress_is_given_up(cluster: Cluster, model: Model, code: str | None) -> None:
    num_puts = 0

    def stuck(job: str, file: ContentFile, offset: int, body: object) -> int:
        nonlocal num_puts
        num_puts += 1
        assert num_puts <= _MOST_PUTS, "the upload is endless"
        if code is not None:
            raise HeadRefused("another upload is under way", code, 409)
        return offset

    cluster.link.put = stuck  # type: ignore[method-assign, assignment]
    with pytest.raises((HeadUnreachable, HeadRefused)):
        model.send()


def test_send_goes_on_with_a_file_of_which_the_head_was_killed_before_its_check(cluster: Cluster, model: Model) -> None:
    digest = hashlib.sha256(b"a" * 5000).hexdigest()
    partial = cluster.head.settings.home / "incoming" / model.job_id / f"{digest}.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"a" * 5000)
    model.send()
    assert model.placed.read_bytes() == b"a" * 5000


def test_send_and_the_agent_that_note_something_at_once_lose_nothing(
    cluster: Cluster, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, write, agents = model.sender, send.write_durably, list[threading.Thread]()

    def write_slowly(path: Path, text: str) -> None:
        if not agents:
            agents.append(threading.Thread(target=sender.forget_sent, args=(model.job_id, "other")))
            agents[0].start()
            agents[0].join(0.2)
        write(path, text)

    monkeypatch.setattr(send, "write_durably", write_slowly)
    model.send()
    agents[0].join(10)
    assert sender.has_sent(model.job_id, model.name)
    assert sender.has_sent_before(model.job_id, "other")
