"""Imports: light code loads nothing heavy, and rooms are imported by their package. `make check` checks directions."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.exports import exported_names

ROOT = Path(__file__).parents[2]
FLOORS = ("service", "planner", "actors", "engine", "storage")
STANDARD = sys.stdlib_module_names
# The arithmetic of plans, and the plans that a job follows.
ARITHMETIC = (
    "planner/baselines",
    "planner/cost",
    "planner/hardware",
    "planner/solver",
    "engine/memory_plan",
    "engine/lanes",
    "engine/training_config",
)


def import_statements(path: Path) -> list[tuple[str, list[str]]]:
    """Each import of a file, at any place in it: the module, and the names imported from it.

    Relative imports are refused.
    """
    statements: list[tuple[str, list[str]]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                statements += [(alias.name, []) for alias in node.names]
            case ast.ImportFrom():
                assert node.level == 0, f"{path} has a relative import"
                statements.append((str(node.module), [alias.name for alias in node.names]))
    return statements


def imported(path: Path) -> set[str]:
    return {module for module, _ in import_statements(path)}


def outside(path: Path, *allowed: str) -> list[str]:
    """Imports of a file beyond the standard library and the `allowed` modules."""
    return sorted(
        name
        for name in imported(path)
        if name.partition(".")[0] not in STANDARD and not any(name == a or name.startswith(f"{a}.") for a in allowed)
    )


def python_files(*folders: str) -> list[Path]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert paths
    return paths


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", python_files("actors/messages"), ids=name_of)
def test_messages_import_only_ids(path: Path) -> None:
    allowed = ("windlass.storage.ids", "windlass.actors.messages", "windlass.exports")
    assert outside(path, *allowed) == (["msgspec"] if path.name == "codec.py" else [])


def test_ids_import_nothing() -> None:
    assert outside(ROOT / "storage/ids.py") == []


@pytest.mark.parametrize("path", python_files("actors/policy", "actors/worker_policy"), ids=name_of)
def test_policy_is_pure(path: Path) -> None:
    allowed = (
        "windlass.storage.ids",
        "windlass.storage.priority_queue",
        "windlass.actors.messages",
        "windlass.actors.policy",
        "windlass.actors.worker_policy",
        "windlass.exports",
    )
    assert outside(path, *allowed) == []
    # Events in, instructions out: no clock, no I/O, no randomness.
    assert not imported(path) & {"time", "datetime", "random", "os", "pathlib", "threading", "queue", "socket"}


@pytest.mark.parametrize("path", python_files(*ARITHMETIC), ids=name_of)
def test_the_planners_arithmetic_is_arithmetic_only(path: Path) -> None:
    # Apart from arithmetic, they read files that users write: profiles of machines, shapes of models.
    rooms = [f"windlass.{folder.replace('/', '.')}" for folder in ARITHMETIC]
    light = ("windlass.amounts", "windlass.exports", "windlass.storage.ids")
    assert outside(path, "numpy", "highspy", "pydantic", "yaml", *light, *rooms) == []


def test_only_the_service_and_what_runs_a_job_on_ray_know_ray() -> None:
    users = {
        name_of(path)
        for path in python_files("storage", "planner", "engine", "actors")
        if any(name.partition(".")[0] == "ray" for name in imported(path))
    }
    assert users == {"actors/runtime/ray_box.py", "actors/runtime/ray_runner.py"}


@pytest.mark.parametrize("floor", FLOORS)
def test_a_room_is_entered_by_its_exported_names(floor: str) -> None:
    """A module of another room is imported from that room's package, which exports the names for others."""
    reaching = []
    for path in python_files(floor):
        own_room = ".".join(("windlass", *path.relative_to(ROOT).parent.parts))
        for module, names in import_statements(path):
            floor_folders = module.split(".")[1:]
            if module.split(".")[0] != "windlass" or len(floor_folders) < 2:
                continue
            target = ROOT.joinpath(*floor_folders)
            room = module if target.is_dir() else module.rpartition(".")[0]
            if room in (own_room, f"windlass.{floor_folders[0]}"):
                continue
            if room != module:
                reaching.append(f"{name_of(path)} imports {module}")
                continue
            exported = exported_names(target / "__init__.pyi")
            reaching += [f"{name_of(path)} imports {name} of {module}" for name in names if name not in exported]
    assert reaching == []


def test_no_exported_name_is_a_modules_name_too() -> None:
    """Python would replace the name by the module as soon as the module is imported."""
    clashes = [
        f"{stub.relative_to(ROOT)}: {name}"
        for floor in FLOORS
        for stub in (ROOT / floor).rglob("__init__.pyi")
        for name, module in exported_names(stub).items()
        if (stub.with_name(f"{name}.py").exists() or stub.with_name(name).is_dir())
        and module != ".".join(("windlass", *stub.relative_to(ROOT).parent.parts))
    ]
    assert clashes == []


def test_rooms_are_small_enough_to_overlook() -> None:
    """At most 12 modules a room and 15 rooms a folder; `versions` grows with each migration."""
    folders = {path.parent for path in python_files(*FLOORS) if path.parent.name != "versions"}
    modules = {folder: [path for path in folder.glob("*.py") if path.name != "__init__.py"] for folder in folders}
    rooms = {folder: [each for each in folders if each.parent == folder] for folder in folders}
    assert {name_of(folder): len(paths) for folder, paths in modules.items() if len(paths) > 12} == {}
    assert {name_of(folder): len(each) for folder, each in rooms.items() if len(each) > 15} == {}


@pytest.mark.parametrize(
    "modules",
    [
        ("windlass.actors.ssd.server", "windlass.actors.scheduler.scheduler", "windlass.storage.store.tensor_store"),
        (
            "windlass.actors.policy.scheduler_core",
            "windlass.engine.memory_plan.arena.layout",
            "windlass.engine.model.layout",
        ),
        ("windlass.planner.simulation.simulate",),
    ],
    ids=["actors", "policy", "simulation"],
)
def test_light_actors_do_not_load_what_is_heavy(modules: tuple[str, ...], tmp_path: Path) -> None:
    code = (
        f"import sys, {', '.join(modules)}\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'fastapi', 'sqlalchemy', 'highspy') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.short("api", "supervisor", "optimizer")
@pytest.mark.parametrize(
    ("role", "absent"),
    [
        ("windlass.actors.optimizer.worker", ("transformers", "ray", "sympy", "torch._dynamo")),
        ("windlass.service.processes.supervisor", ("torch", "transformers", "ray", "fastapi", "numpy", "alembic")),
        ("windlass.service.api.app", ("torch", "transformers", "ray", "alembic")),
        ("windlass.service.dispatcher.process", ("torch", "transformers", "fastapi", "alembic")),
        ("windlass.service.processes.shutdown", ("torch", "transformers", "ray", "fastapi", "alembic")),
    ],
    ids=["optimizer", "supervisor", "api", "dispatcher", "down"],
)
def test_service_process_loads_only_needed_modules(role: str, absent: tuple[str, ...], tmp_path: Path) -> None:
    code = f"import sys, {role}\nprint([name for name in {absent} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
