"""Joining a head: what the head says is checked before it becomes a name here."""

import pytest

from windlass.service.cluster.box.join import HeadFacts, JoinError, match_versions
from windlass.service.cluster.versions import Versions


def test_head_whose_version_is_a_path_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("_WINDLASS_HEADS_VERSION_INSTALLED", raising=False)
    versions = Versions.here().model_copy(update={"windlass": "1/../../victim"})
    head = HeadFacts(url="https://127.0.0.1:1", authority="", versions=versions, wheel_sha256="0" * 64)
    with pytest.raises(JoinError, match="no version of the right form"):
        match_versions(head, lambda _line: None)
