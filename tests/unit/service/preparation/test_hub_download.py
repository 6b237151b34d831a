"""A download is whole or not there, and a failed one says why."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.support.power_cut import PowerCut
from windlass.service.preparation.hub_download import main


def _run(tmp_path: Path) -> dict[str, Any]:
    result = tmp_path / "result.json"
    arguments = ["--model", "organization/tiny", "--model-dir", str(tmp_path / "models" / "tiny")]
    code = main([*arguments, "--result", str(result)])
    found: dict[str, Any] = json.loads(result.read_text())
    assert (code == 0) == found["ok"]
    return found


def test_the_folder_takes_its_name_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        assert model == "organization/tiny"
        assert not (tmp_path / "models" / "tiny").exists()
        assert local_dir.name.startswith(".")
        assert not {"*.bin", "*.py", "*.pt"} & set(allow_patterns)
        (local_dir / "config.json").write_text("{}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert _run(tmp_path) == {"ok": True}
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny"]


def test_download_power_loss_afterwards_leaves_the_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(model: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        (local_dir / "config.json").write_text("{}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    (tmp_path / "models").mkdir()
    cut = PowerCut(tmp_path / "models", monkeypatch)
    _run(tmp_path)
    assert cut.left() == {"tiny/config.json": b"{}"}


def test_a_failure_names_the_model_and_the_reason_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model: str, **_options: object) -> None:
        raise OSError("401 Client Error: gated repository\nmany more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    error = _run(tmp_path)["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'organization/tiny'" in error["message"]
    assert "gated repository" in error["message"]
    assert "\n" not in error["message"]
    assert not (tmp_path / "models" / "tiny").exists()
