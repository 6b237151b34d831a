"""The files that a power loss leaves after a sync."""

from pathlib import Path

import pytest

from tests.support.power_cut import PowerCut, files_of
from windlass.storage.files.durable import sync_path, sync_tree, write_atomically, write_durably


def test_write_durably_power_loss_afterwards_leaves_the_new_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "facts").write_text("old")
    cut = PowerCut(tmp_path, monkeypatch)
    write_durably(tmp_path / "facts", "new")
    write_durably(tmp_path / "more", "text")
    assert cut.left() == {"facts": b"new", "more": b"text"} == files_of(tmp_path)


def test_sync_tree_power_loss_afterwards_leaves_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = PowerCut(tmp_path, monkeypatch)
    (tmp_path / "model" / "more").mkdir(parents=True)
    for name in ("model/a", "model/more/b"):
        (tmp_path / name).write_text(name)
    (tmp_path / "model" / "link").symlink_to("nowhere")
    synced: list[dict[str, bytes]] = []
    sync_tree(tmp_path / "model", lambda: synced.append(cut.left()))
    assert len(synced) == 3  # two files and a folder
    assert cut.left() == {}  # its own name is not durable yet
    sync_path(tmp_path)
    assert cut.left() == {"model/a": b"model/a", "model/more/b": b"model/more/b"}


def test_power_cut_leaves_nothing_of_what_was_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests rely on this."""
    cut = PowerCut(tmp_path, monkeypatch)
    (tmp_path / "a").write_text("a")
    assert cut.left() == {}
    sync_path(tmp_path)
    assert cut.left() == {"a": b""}
    sync_path(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert cut.left() == {"a": b"a"}


def test_write_atomically_leaves_the_old_file_if_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "facts"
    write_atomically(path, "old", mode=0o600)
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert files_of(tmp_path) == {"facts": b"old"}
    assert path.stat().st_mode & 0o777 == 0o600
