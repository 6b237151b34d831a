"""Makes workers with a simulated GPU compute on the CPU, and records each process of a job with the GPUs that it sees.

Python imports a module of this name when it starts. It patches modules of the product when they are imported.
"""

import os
import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def _compute_on_the_cpu(compute_device: ModuleType) -> None:
    import torch

    compute_device.compute_device = lambda *, uses_gpu: torch.device("cpu")


def _note_visible_gpus(ray_box: ModuleType) -> None:
    start = ray_box.start_actor

    def note_and_start(name: str, context: Any, *arguments: Any, **options: Any) -> Any:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        for kind, text in (("visible-gpus", visible), ("process", str(os.getpid()))):
            # Written atomically, because the test may read it at any time.
            file = Path(context.spec.job_dir, f"{kind}-{name.replace('/', '+')}")  # as `_file_name` does
            partial = file.with_name(f"partial-{file.name}")
            partial.write_text(text)
            partial.replace(file)
        return start(name, context, *arguments, **options)

    ray_box.start_actor = note_and_start


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "windlass.engine.device.device_choice": _compute_on_the_cpu,
    "windlass.actors.runtime.ray_box": _note_visible_gpus,
}


runpy.run_path(str(Path(__file__).parents[1] / "support/changed_imports.py"))["change_when_imported"](_CHANGES)
