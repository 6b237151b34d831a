"""The box's side of joining: what the head says is checked, and jobs of one head are not offered to another."""

from pathlib import Path

import pytest

from tests.support.service.cluster import Head, running_head
from windlass.service.cluster import Versions
from windlass.service.cluster.authority.codes import JoinCode
from windlass.service.cluster.box.join import HeadFacts, JoinError, ask_to_join, forget_head, match_versions
from windlass.service.installation.settings import Settings
from windlass.service.machine.fleet.content import taken_dir
from windlass.storage.sql.repositories.boxes import BoxRepository, BoxState


def _join(head: Head, home: Path) -> None:
    with head.database.write() as session:
        box = BoxRepository(session).by_name("attic")
        if box is not None:
            BoxRepository(session).set(box.id, state=BoxState.REMOVED.value)
    authority = (head.settings.home / "cluster" / "authority.pem").read_text()
    facts = HeadFacts(url=head.url, authority=authority, versions=Versions.here(), wheel_sha256=None)
    ask_to_join(Settings(home=home), facts, JoinCode.parse(head.new_code()), "attic")


def _taken(home: Path) -> list[str]:
    return sorted(path.stem for path in taken_dir(home).glob("*.json"))


def test_jobs_that_one_head_gave_are_set_aside_for_another_and_found_again(tmp_path: Path) -> None:
    home = tmp_path / "box"
    home.mkdir()
    with running_head(tmp_path / "first") as first, running_head(tmp_path / "second") as second:
        _join(first, home)
        taken_dir(home).mkdir()
        (taken_dir(home) / "ftjob-1.json").write_text("{}")
        forget_head(home)
        _join(first, home)
        assert _taken(home) == ["ftjob-1"]
        forget_head(home)
        _join(second, home)
        assert _taken(home) == []
        taken_dir(home).mkdir(exist_ok=True)
        (taken_dir(home) / "ftjob-2.json").write_text("{}")
        forget_head(home)
        _join(first, home)
        assert _taken(home) == ["ftjob-1"]


def test_taken_jobs_of_an_unknown_head_are_set_aside(tmp_path: Path) -> None:
    home = tmp_path / "box"
    taken_dir(home).mkdir(parents=True)
    (taken_dir(home) / "ftjob-1.json").write_text("{}")
    with running_head(tmp_path / "head") as head:
        _join(head, home)
    assert _taken(home) == []


def test_head_whose_version_is_a_path_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("_WINDLASS_HEADS_VERSION_INSTALLED", raising=False)
    versions = Versions.here().model_copy(update={"windlass": "1/../../victim"})
    head = HeadFacts(url="https://127.0.0.1:1", authority="", versions=versions, wheel_sha256="0" * 64)
    with pytest.raises(JoinError, match="no version of the right form"):
        match_versions(head, lambda _line: None)
