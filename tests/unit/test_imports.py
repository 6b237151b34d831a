"""What must stay light does not import what is heavy. That imports run one way is held by `make check`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STANDARD = sys.stdlib_module_names


def imported(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it; relative imports are refused."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                assert node.level == 0, f"{path} has a relative import"
                found.add(str(node.module))
    return found


def outside(path: Path, *allowed: str) -> list[str]:
    """Imports of a file beyond the standard library and the `allowed` modules."""
    return sorted(
        name
        for name in imported(path)
        if name.partition(".")[0] not in STANDARD and not any(name == a or name.startswith(f"{a}.") for a in allowed)
    )


def python_files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


def test_messages_know_ids_only() -> None:
    assert outside(ROOT / "actors/messages.py", "windlass.storage.ids") == []
    assert outside(ROOT / "storage/ids.py") == []


@pytest.mark.parametrize("path", python_files("actors/policy"), ids=lambda path: path.name)
def test_policy_is_standard_library_and_ids(path: Path) -> None:
    allowed = ("windlass.storage.ids", "windlass.actors.messages", "windlass.actors.policy")
    assert outside(path, *allowed) == []
    # Events in, instructions out: no clock, no I/O, no randomness.
    assert not imported(path) & {"time", "datetime", "random", "os", "pathlib", "threading", "queue", "socket"}


@pytest.mark.parametrize("path", python_files("planner"), ids=lambda path: path.name)
def test_the_planner_is_arithmetic_only(path: Path) -> None:
    # Beside arithmetic there are the files that people write: profiles of machines, shapes of models.
    assert outside(path, "numpy", "scipy", "pydantic", "yaml", "windlass.amounts", "windlass.planner") == []


def test_only_the_service_and_deploy_know_ray() -> None:
    users = {
        str(path.relative_to(ROOT))
        for folder in ("storage", "planner", "engine", "actors")
        for path in python_files(folder)
        if any(name.partition(".")[0] == "ray" for name in imported(path))
    }
    assert users == {"actors/deploy.py"}


@pytest.mark.parametrize(
    "modules",
    [
        ("windlass.actors.ssd_server", "windlass.actors.scheduler", "windlass.storage.tensor_store"),
        ("windlass.actors.policy.pipeline", "windlass.planner.plan", "windlass.engine.layout"),
        ("windlass.actors.simulation",),
    ],
    ids=["actors", "policy", "simulation"],
)
def test_light_actors_do_not_load_what_is_heavy(modules: tuple[str, ...], tmp_path: Path) -> None:
    code = (
        f"import sys, {', '.join(modules)}\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'fastapi', 'sqlalchemy', 'scipy') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("role", "absent"),
    [
        ("windlass.service.supervisor", ("torch", "transformers", "ray", "fastapi", "numpy", "alembic")),
        ("windlass.service.app", ("torch", "transformers", "ray", "alembic")),
        ("windlass.service.dispatcher_process", ("torch", "transformers", "fastapi", "alembic")),
        ("windlass.service.lifecycle", ("torch", "transformers", "ray", "fastapi", "alembic")),
    ],
    ids=["supervisor", "api", "dispatcher", "down"],
)
def test_a_process_of_the_service_holds_what_it_needs(role: str, absent: tuple[str, ...], tmp_path: Path) -> None:
    code = f"import sys, {role}\nprint([name for name in {absent} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
