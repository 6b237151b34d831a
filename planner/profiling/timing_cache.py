"""Stores the times of a model's blocks for later jobs, because measuring takes all cores for seconds."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.engine.fingerprint import code_fingerprint
from windlass.planner.cost import AgainTimes
from windlass.planner.profiling.measure_model import BlockTimes, MeasuredBlocks

_MOST_KEPT = 256  # files in the folder; the oldest are deleted

# Relative error above which times are not stored: other work ran meanwhile, and the next job may have all cores.
_LARGEST_ERROR = 0.05

Measure = Callable[[], MeasuredBlocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingCache:
    """Stored block times of one machine. They apply to any weights of a model, because measurements use random ones."""

    folder: Path  # created when the first times are stored
    machine: Mapping[str, Any]  # its profile as JSON, and threads: new rates make it another machine
    is_alone: bool  # no job trains on this machine; else measured times are not stored

    def of(self, config: Any, facts: Mapping[str, Any], measure: Measure) -> dict[int, BlockTimes]:
        """Returns the times by block, and measures them if they are not stored.

        `config`: a transformers config. `facts`: all else that the times depend on.
        """
        stored = self.known(config, facts)
        if stored is not None:
            return stored
        measured = measure()
        if self.is_alone and measured.standard_error <= _LARGEST_ERROR:
            with contextlib.suppress(OSError):  # a full disk costs only the next job a measurement
                self._keep(self._path(config, facts), measured.times)
        return measured.times

    def known(self, config: Any, facts: Mapping[str, Any]) -> dict[int, BlockTimes] | None:
        """Returns the stored times, or None."""
        return _load(self._path(config, facts))

    def _path(self, config: Any, facts: Mapping[str, Any]) -> Path:
        return self.folder / f"{self._fingerprint(config, facts)}.json"

    def _fingerprint(self, config: Any, facts: Mapping[str, Any]) -> str:
        model = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
        hashed = [model, dict(facts), dict(self.machine), code_fingerprint(Path(__file__).parent)]
        return hashlib.sha256(json.dumps(hashed, sort_keys=True, default=str).encode()).hexdigest()

    def _keep(self, path: Path, times: Mapping[int, BlockTimes]) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps({block: asdict(block_times) for block, block_times in times.items()}))
        partial.replace(path)
        kept = sorted(self.folder.glob("*.json"), key=lambda block_times: block_times.stat().st_mtime_ns)
        for old in kept[:-_MOST_KEPT]:
            old.unlink(missing_ok=True)


def _load(path: Path) -> dict[int, BlockTimes] | None:
    try:
        times = {int(block): _times_of(saved) for block, saved in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    return times or None


def _times_of(saved: dict[str, Any]) -> BlockTimes:
    again = saved["again"]
    return BlockTimes(**saved | {"again": None if again is None else AgainTimes(**again)})
