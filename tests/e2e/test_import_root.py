"""windlass works in a directory with folders named like its own packages, and its wheel contains all of the package."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WINDLASS = str(Path(sys.executable).with_name("windlass"))


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A directory whose `storage` and `engine` raise an error when imported."""
    (tmp_path / "storage").mkdir()
    for name in ("storage/__init__.py", "engine.py"):
        (tmp_path / name).write_text("raise ImportError('a bare name was imported from the working directory')\n")
    return tmp_path


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(
        command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("name", ["storage", "engine"])
def test_trap_folder_bare_import_raises(trap: Path, name: str) -> None:
    result = run([sys.executable, "-c", f"import {name}"], trap)
    assert "a bare name was imported from the working directory" in result.stderr


@pytest.mark.short("*windlass --help-submit")
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([WINDLASS, "--help"], "submit"),
        ([sys.executable, "-m", "windlass.engine.checkpoint.check_model", "--help"], "--model-dir"),
        ([sys.executable, "-m", "windlass.engine.data.tokenize", "--help"], "usage"),
        ([sys.executable, "-m", "windlass.service", "--help"], "dispatcher"),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, list) else None,
)
def test_commands_start_beside_bare_names(trap: Path, command: list[str], expected: str) -> None:
    result = run(command, trap)
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout


def test_a_wheel_holds_the_whole_package(tmp_path: Path, trap: Path) -> None:
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
    result = run([*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = wheels.glob("windlass-*.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(unpacked)

    # All files that git would clone of the package's folders, through the links in src/.
    folders = [link for link in (ROOT / "src" / "windlass").iterdir() if link.is_symlink()]
    assert {"actors", "engine", "planner", "service", "storage", "web"} == {folder.name for folder in folders}
    for folder in folders:
        for path in folder.resolve().rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"windlass/{path.relative_to(ROOT)}" in names
    assert {"windlass/storage/ids.py", "windlass/py.typed", "windlass/__init__.py"} <= names
    assert any(name.startswith("windlass/web/templates/") for name in names)
    assert any(name.startswith("windlass/storage/sql/migrations/versions/v0001") for name in names)
    strangers = {name.split("/")[0] for name in names} - {"windlass"}
    assert all(name.endswith(".dist-info") for name in strangers)

    code = "import windlass, windlass.storage.ids, windlass.actors.messages; print(windlass.__file__)"
    found = run([sys.executable, "-c", code], trap, PYTHONPATH=str(unpacked))
    assert found.stdout.strip() == str(unpacked / "windlass" / "__init__.py"), found.stderr
