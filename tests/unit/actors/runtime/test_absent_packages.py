"""Packages that a worker process takes as absent."""

import subprocess
import sys
from pathlib import Path

import pytest

_CODE = """
import importlib, sys
import windlass.actors.runtime.absent_packages
import ray.util.serialization_addons as addons
class Context:
    def _register_cloudpickle_serializer(self, *args, **kwargs): pass
addons.apply(Context())
for module in ("gpu_worker.worker", "optimizer.worker", "ssd.server", "runtime.ray_box"):
    importlib.import_module(f"windlass.actors.{module}")
import transformers.modeling_utils
loaded = {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}
print(sorted(loaded & {"pydantic", "pydantic_core", "starlette", "scipy"}))
"""


@pytest.mark.long
def test_worker_imports_everything_without_the_absent_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _CODE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
