"""Whole model folders: copied, measured, removed."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.power_cut import PowerCut, files_of
from windlass.engine.checkpoint import model_folder
from windlass.engine.checkpoint.model_folder import copy_model_folder, folder_nbytes, remove_model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(10_000))
    (folder / "more" / "empty").write_bytes(b"")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize("can", [False, True])
def test_a_copy_is_whole_whatever_the_file_system_can(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, links: bool, can: bool
) -> None:
    def cannot(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    if not can:
        monkeypatch.setattr(fcntl, "ioctl", cannot)
        monkeypatch.setattr(Path, "hardlink_to", cannot)
    told: list[int] = []
    copy_model_folder(model, tmp_path / "copy", links=links, on_progress=told.append)
    assert contents(tmp_path / "copy") == contents(model)
    assert told == sorted(told)
    assert told[-1] == folder_nbytes(model) == 10_002
    assert told.count(told[-1]) > len(list(model.rglob("*")))  # the last file is complete, and each one is synced
    is_same = (tmp_path / "copy" / "model.safetensors").samefile(model / "model.safetensors")
    assert is_same == (links and can)


def test_a_copy_is_the_owners_to_change(tmp_path: Path, model: Path) -> None:
    copy_model_folder(model, tmp_path / "copy", links=False)
    (tmp_path / "copy" / "config.json").write_text("[]")
    assert (model / "config.json").read_text() == "{}"


def test_nothing_is_overwritten(tmp_path: Path, model: Path) -> None:
    (tmp_path / "copy").mkdir()
    with pytest.raises(FileExistsError, match="copy"):
        copy_model_folder(model, tmp_path / "copy", links=True)
    assert contents(tmp_path / "copy") == {}


def test_a_failure_leaves_nothing(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(model_folder, "copy_file", full)
    with pytest.raises(OSError, match="full"):
        copy_model_folder(model, tmp_path / "copy", links=False)
    assert list(tmp_path.iterdir()) == [model]


def test_a_removed_folder_is_gone_and_twice_is_once(tmp_path: Path, model: Path) -> None:
    remove_model_folder(model)
    remove_model_folder(model)
    assert list(tmp_path.iterdir()) == []
    assert folder_nbytes(model) == 0


@pytest.mark.parametrize("links", [False, True])
def test_copy_power_loss_afterwards_leaves_the_whole_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    (tmp_path / "out").mkdir()
    cut = PowerCut(tmp_path / "out", monkeypatch)
    copy_model_folder(model, tmp_path / "out" / "copy", links=links)
    assert cut.left() == files_of(tmp_path / "out")
    assert len(cut.left()) == 3
