"""Files with the spans of a job's last steps, one file per step in the job's folder. Older files are deleted."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.memory_levels import Level
from windlass.engine.memory_plan import MemoryTier
from windlass.storage.files import write_atomically

FOLDER = "timeline"  # in the job's folder
SIMULATED_FOLDER = "simulated"  # next to the files of the plan
KEPT_STEPS = 8  # number of steps whose files are kept

_PREFIX = "step-"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """The spans of a step's period, and the other spans of the step that are known when it is reported."""

    step: int
    start_s: float  # time.monotonic() of the machine
    end_s: float
    summary: dict[str, Any]
    spans: tuple[WorkSpan, ...]
    levels: tuple[Level, ...] = ()  # memory in use; only for simulated steps


def keep_step(folder: Path, kept: StepSpans) -> None:
    """Writes a step's file, and removes the files of old steps and of steps after this one.

    Later steps exist if an attempt resumed from an earlier commit. A reader never sees a partial file.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    for step in held_steps(folder):
        if not kept.step - KEPT_STEPS < step <= kept.step:
            _path(folder, step).unlink(missing_ok=True)
    facts = {name: getattr(kept, name) for name in ("start_s", "end_s", "summary", "spans", "levels")}
    write_atomically(_path(folder, kept.step), json.dumps(facts, separators=(",", ":")))


def held_steps(folder: Path) -> list[int]:
    """Returns the steps that have files, smallest first."""
    return sorted(int(path.stem.removeprefix(_PREFIX)) for path in folder.glob(f"{_PREFIX}*.json"))


def load_step(folder: Path, step: int) -> StepSpans | None:
    """Returns a step's spans; None if it has no file."""
    try:
        facts = json.loads(_path(folder, step).read_text())
    except FileNotFoundError:
        return None
    spans = tuple(WorkSpan(resource, SpanKind(kind), *rest) for resource, kind, *rest in facts.pop("spans"))
    levels = tuple(
        Level(MemoryTier(tier), what, allocated_nbytes, tuple((at_s, nbytes) for at_s, nbytes in points))
        for tier, what, allocated_nbytes, points in facts.pop("levels", ())
    )
    return StepSpans(step=step, spans=spans, levels=levels, **facts)


def _path(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step}.json"
