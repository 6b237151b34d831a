"""A home and a model's shape for commands that plan."""

from pathlib import Path

import pytest

from tests.support.service.plan_command import SHAPE


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "shape.yaml"
    path.write_text(SHAPE)
    return path
