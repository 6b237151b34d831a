"""The command `plan` loads torch only for a model that is neither known nor was planned before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine.folders import make_model_folder

# Libraries that take a second or more to load, or that a plan has no use for.
HEAVY = ("torch", "transformers", "ray", "sqlalchemy", "fastapi", "plotly")
COMMAND = f"""
import sys
from windlass.service.cli import main
try:
    main()
finally:
    print("loaded:", *[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
SHAPE = "num_layers: 2\nhidden_size: 256\nnum_heads: 4\nvocab_size: 1000\n"


def plan(home: Path, model: object, *options: str) -> tuple[dict[str, object], list[str]]:
    """Runs the command. Returns its answer, and the heavy libraries that it has loaded."""
    asked = ("--model", str(model), "--batch-size", "2", "--seq-len", "32", "--hardware", "rtx4090-server", "--json")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND, "plan", *asked, "--home", str(home), *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    (loaded,) = [line for line in ran.stderr.splitlines() if line.startswith("loaded:")]
    return json.loads(ran.stdout), loaded.split()[1:]


def test_plan_of_a_shape_loads_no_torch(tmp_path: Path) -> None:
    shape = tmp_path / "shape.yaml"
    shape.write_text(SHAPE)
    answer, loaded = plan(tmp_path / "home", shape, "--num-microbatches", "1")
    assert answer["feasible"]
    assert loaded == []


@pytest.mark.long
@pytest.mark.parametrize(
    "changed", [(), ("--no-clip", "--state-precision", "split"), ("--num-validation-examples", "2")]
)
def test_plan_of_a_folder_that_was_planned_before_loads_no_torch(changed: tuple[str, ...], tmp_path: Path) -> None:
    folder, home = tmp_path / "model", tmp_path / "home"
    make_model_folder(folder, "mixtral")
    first, loaded = plan(home, folder, *changed)
    assert "torch" in loaded
    assert plan(home, folder, *changed) == (first, [])
