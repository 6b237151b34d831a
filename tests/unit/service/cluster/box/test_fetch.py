"""Contents that a box fetches: cut off, damaged, shared, and removed for lack of room."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.service.cluster.box.connection import HeadUnreachable
from windlass.service.cluster.box.fetch import Blobs, NoRoomHereError, Progress, WrongContentError
from windlass.service.installation.settings import Settings
from windlass.service.machine.fleet.content import ContentFile, Where
from windlass.storage.cancellation import CancelToken


class StandInLink:
    """A head that sends contents, cut or damaged as the test decides."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.asked: list[tuple[str, int]] = []
        self.cut_after: int | None = None
        self.damages = 0

    def add(self, content: bytes, path: str, where: Where = Where.MODEL) -> ContentFile:
        digest = hashlib.sha256(content).hexdigest()
        self.contents[digest] = content
        return ContentFile(path=path, where=where, nbytes=len(content), sha256=digest)

    def content(self, digest: str, offset: int) -> Iterator[bytes]:
        self.asked.append((digest, offset))
        rest = self.contents[digest][offset:]
        if self.damages:
            self.damages -= 1
            rest = rest[:-1] + b"?"
        for start in range(0, len(rest), 10):
            if self.cut_after is not None and start >= self.cut_after:
                raise HeadUnreachable("cut")
            yield rest[start : start + 10]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(home=tmp_path)
    settings.make_dirs()
    return settings


def fetch(blobs: Blobs, link: StandInLink, *files: ContentFile, in_use: tuple[str, ...] = ()) -> Progress:
    told: list[Progress] = []
    token = CancelToken()
    blobs.fetch(link, "ftjob-1", files, cancel=token, in_use=in_use, on_begin=told.append)  # type: ignore[arg-type]
    return told[0]


def test_fetch_brings_each_content_once_and_links_it_into_all_places(settings: Settings) -> None:
    link, blobs = StandInLink(), Blobs(settings)
    files = [link.add(b"weights" * 100, "a/w"), link.add(b"weights" * 100, "b/w"), link.add(b"", "a/empty")]
    progress = fetch(blobs, link, *files, link.add(b"plan", "prepare/plan_job.json", Where.JOB))
    assert progress.done_nbytes == progress.total_nbytes == 1404
    assert len(link.asked) == 2  # and nothing for the empty one
    places = [settings.models_dir / "a" / "w", settings.models_dir / "b" / "w"]
    assert {path.stat().st_ino for path in places} == {blobs.path(files[0].sha256).stat().st_ino}
    assert (settings.jobs_dir / "ftjob-1" / "prepare" / "plan_job.json").read_text() == "plan"
    link.asked.clear()
    fetch(blobs, link, *files)
    assert link.asked == []


def test_fetch_goes_on_after_a_cut_where_it_ended(settings: Settings) -> None:
    link, blobs = StandInLink(), Blobs(settings)
    file = link.add(bytes(range(100)), "a/w")
    link.cut_after = 40
    with pytest.raises(HeadUnreachable, match="cut"):
        fetch(blobs, link, file)
    link.cut_after = None
    progress = fetch(Blobs(settings), link, file)
    assert link.asked == [(file.sha256, 0), (file.sha256, 40)]
    assert progress.done_nbytes == 100
    assert (settings.models_dir / "a" / "w").read_bytes() == bytes(range(100))


def test_fetch_of_a_damaged_content_begins_anew_and_gives_up_in_the_end(settings: Settings) -> None:
    link, blobs = StandInLink(), Blobs(settings)
    file = link.add(b"x" * 25, "a/w")
    link.damages = 1
    assert fetch(blobs, link, file).done_nbytes == 25
    other = link.add(b"y" * 25, "a/v")
    link.damages = 10
    with pytest.raises(WrongContentError, match="a/v arrived 2 times with another SHA-256"):
        fetch(blobs, link, other)
    assert not (settings.models_dir / "a" / "v").exists()


def test_fetch_replaces_a_file_of_other_content_and_keeps_one_of_the_same(settings: Settings) -> None:
    link, blobs = StandInLink(), Blobs(settings)
    folder = settings.models_dir / "a"
    folder.mkdir()
    (folder / "same").write_bytes(b"same")
    (folder / "other").write_bytes(b"othr")
    fetch(blobs, link, link.add(b"same", "a/same"), link.add(b"news", "a/other"))
    assert len(link.asked) == 1
    assert (folder / "other").read_bytes() == b"news"


def test_fetch_without_room_removes_the_longest_unused_contents_first(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, blobs = StandInLink(), Blobs(settings)
    old, kept = link.add(b"o" * 100, "old/w"), link.add(b"k" * 100, "kept/w")
    fetch(blobs, link, old)
    fetch(blobs, link, kept)
    usage = shutil.disk_usage(settings.home)
    free = lambda: 64 * 1024**2 + (150 if (settings.models_dir / "old").exists() else 250)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free()))
    new = link.add(b"n" * 200, "new/w")
    fetch(blobs, link, new, in_use=(kept.sha256,))
    assert not (settings.models_dir / "old").exists()
    assert (settings.models_dir / "kept" / "w").exists()
    with pytest.raises(NoRoomHereError, match="room on the disk of"):
        fetch(blobs, link, link.add(b"m" * 300, "more/w"), in_use=(kept.sha256, new.sha256))


def test_fetch_copies_to_another_file_system(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    link = StandInLink()
    fetch(Blobs(settings), link, link.add(b"weights", "a/w"))
    assert (settings.models_dir / "a" / "w").read_bytes() == b"weights"


def test_fetch_ends_when_it_is_cancelled(settings: Settings) -> None:
    link, token = StandInLink(), CancelToken()
    token.cancel()
    with pytest.raises(InterruptedError):
        Blobs(settings).fetch(link, "ftjob-1", [link.add(b"x", "a/w")], cancel=token)  # type: ignore[arg-type]
