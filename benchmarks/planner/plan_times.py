"""Measures how long a plan takes: from the shell, and in a running service after a setting was changed.

The models are Ratel's (its table IV), on its server. From the shell, each plan is one process, in a home that has
planned nothing. In the service, the first plan of each model does not count.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.api.service import running
from benchmarks.papers.published.models import RATEL_SHAPES
from windlass.planner.hardware import Hardware, example_machines, load
from windlass.planner.profiling import config_of_shape
from windlass.service.cli.plan import EXIT_DOES_NOT_FIT
from windlass.service.installation import Settings
from windlass.storage.sql import migrate

_MACHINE = "rtx4090-server"
_BATCH_SIZE, _NUM_TOKENS = 8, 1024
# Changes of a request to the service, one at a time.
_CHANGES: dict[str, dict[str, Any]] = {
    "a batch twice as large": {"batch_size": 2 * _BATCH_SIZE},
    "no clipping": {"windlass": {"clip_norm": None}},
    "four micro-batches": {"windlass": {"num_microbatches": 4}},
    "states in 16 bit": {"windlass": {"state_precision": "bf16"}},
    "twice as many tokens": {"windlass": {"sequence_length": 2 * _NUM_TOKENS}},
}
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTime:
    """The time of one plan."""

    title: str
    wall_s: float  # until the plan itself
    cpu_s: float  # of the process and its children; 0 for a plan of the service
    fits: bool
    first_s: float | None = None  # until the estimate by formulas, which the service sends before the plan
    advised_s: float | None = None  # until the plan has its advice, which follows the plan itself


def shell_times(sizes: Sequence[int], folder: Path) -> list[PlanTime]:
    """Runs `windlass plan` for each size in billions of parameters, with and without clipping."""
    times = []
    for size in sizes:
        shape = folder / f"{size}B.yaml"
        shape.write_text(yaml.safe_dump(RATEL_SHAPES[size].model_dump(exclude_none=True)))
        for clips in (True, False):
            home = folder / f"{size}B-{'clip' if clips else 'no-clip'}"
            home.mkdir(mode=0o700)
            times.append(_shell_time(size, shape, home, clips=clips))
    return times


def _shell_time(size: int, shape: Path, home: Path, *, clips: bool) -> PlanTime:
    command = [str(Path(sys.executable).with_name("windlass")), "plan", "--json", "--model", str(shape)]
    command += ["--hardware", _MACHINE, "--batch-size", str(_BATCH_SIZE), "--seq-len", str(_NUM_TOKENS)]
    command.append("--clip" if clips else "--no-clip")
    environment = os.environ | {"WINDLASS_HOME": str(home)}
    before, start_s = _children_s(), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    wall_s, cpu_s = time.perf_counter() - start_s, _children_s() - before
    if done.returncode not in (0, EXIT_DOES_NOT_FIT):
        raise RuntimeError(f"`{' '.join(command)}` failed:\n{done.stderr[-4000:]}")
    return PlanTime(
        title=_title(size, clips=clips), wall_s=wall_s, cpu_s=cpu_s, fits=json.loads(done.stdout)["feasible"]
    )


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def service_times(sizes: Sequence[int], folder: Path) -> list[PlanTime]:
    """Asks a running service for a plan of each size, and again with one setting changed after the other."""
    home = folder / "home"
    settings = Settings(home=home)
    home.mkdir(mode=0o700)
    hardware = load(Hardware, example_machines()[_MACHINE]).model_dump(exclude_none=True)
    for size in sizes:
        config_of_shape(RATEL_SHAPES[size], num_tokens=2 * _NUM_TOKENS).save_pretrained(
            settings.models_dir / _model(size)
        )
    times = []
    database_url = f"sqlite:///{home / 'windlass.db'}"
    migrate(database_url)
    with running(home, database_url, trains=True, measures=False) as service:
        client = httpx.Client(
            base_url=service.client.base_url, headers=service.client.headers, timeout=_TIMEOUT_S, trust_env=False
        )
        with client:
            for size in sizes:
                body: dict[str, Any] = {
                    "model": _model(size),
                    "batch_size": _BATCH_SIZE,
                    "hardware": hardware,
                    "windlass": {"sequence_length": _NUM_TOKENS, "clip_norm": 1.0},
                }
                _service_time(client, "", body)
                for title, change in _CHANGES.items():
                    changed = body | change
                    changed["windlass"] = {**body["windlass"], **change.get("windlass", {})}
                    times.append(_service_time(client, f"{size}B, {title}", changed))
    return times


def _service_time(client: httpx.Client, title: str, body: dict[str, Any]) -> PlanTime:
    first_s, wall_s, kind, start_s = None, None, "", time.perf_counter()
    with client.stream("POST", "/v1/fine_tuning/plans", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"no plan ({title}): {answer.status_code} {answer.read().decode()[:1000]}")
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
                if first_s is None:
                    first_s = time.perf_counter() - start_s
                if wall_s is None and kind in ("fine_tuning.plan.without_advice", "fine_tuning.plan"):
                    wall_s = time.perf_counter() - start_s
            elif name == "data" and kind == "error":
                raise RuntimeError(f"no plan ({title}): {value[:1000]}")
            elif name == "data":
                plan = json.loads(value)
    advised_s = time.perf_counter() - start_s
    return PlanTime(
        title=title,
        wall_s=wall_s or advised_s,
        cpu_s=0.0,
        fits=plan["feasible"],
        first_s=first_s,
        advised_s=advised_s,
    )


def _model(size: int) -> str:
    return f"ratel-{size}b"


def _title(size: int, *, clips: bool) -> str:
    return f"{size}B{', clipping' if clips else ''}"
