"""The spans of a job's last steps, one file a step in the job's folder; older ones make room."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.memory_levels import Level, Tier

FOLDER = "timeline"  # in the job's folder
SIMULATED_FOLDER = "simulated"  # beside what was planned
KEPT_STEPS = 8

_PREFIX = "step-"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """What happened in a step's period, and what else was done for the step until it was told of."""

    step: int
    start_s: float  # time.monotonic() of the machine
    end_s: float
    summary: dict[str, Any]
    spans: tuple[WorkSpan, ...]
    levels: tuple[Level, ...] = ()  # of memory, where the step was simulated


def keep_step(folder: Path, kept: StepSpans) -> None:
    """Writes a step's spans, and removes those of steps long past or, where an attempt goes back, of steps to come.

    A reader finds a whole file or none.

    Raises:
        OSError: the disk does not take it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    for step in held_steps(folder):
        if not kept.step - KEPT_STEPS < step <= kept.step:
            _path(folder, step).unlink(missing_ok=True)
    facts = {name: getattr(kept, name) for name in ("start_s", "end_s", "summary", "spans", "levels")}
    partial = folder / "partial"
    partial.write_text(json.dumps(facts, separators=(",", ":")))
    partial.replace(_path(folder, kept.step))


def held_steps(folder: Path) -> list[int]:
    """Whose spans are there, smallest first."""
    return sorted(int(path.stem.removeprefix(_PREFIX)) for path in folder.glob(f"{_PREFIX}*.json"))


def load_step(folder: Path, step: int) -> StepSpans | None:
    """A step's spans; None if they are not held, or not any more."""
    try:
        facts = json.loads(_path(folder, step).read_text())
    except FileNotFoundError:
        return None
    spans = tuple(WorkSpan(resource, SpanKind(kind), *rest) for resource, kind, *rest in facts.pop("spans"))
    levels = tuple(
        Level(Tier(tier), what, allocated_nbytes, tuple((at_s, nbytes) for at_s, nbytes in points))
        for tier, what, allocated_nbytes, points in facts.pop("levels", ())
    )
    return StepSpans(step=step, spans=spans, levels=levels, **facts)


def _path(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step}.json"
