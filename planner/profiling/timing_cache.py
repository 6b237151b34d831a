"""Stores the times of a model's blocks for later jobs, because measuring takes all cores for seconds."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.engine.fingerprint import code_fingerprint
from windlass.planner.cost import AgainTimes, TimesFacts
from windlass.planner.profiling.block_times import LARGEST_ERROR, BlockTimes, MeasuredBlocks
from windlass.planner.profiling.machine_pace import MAX_OTHERS, this_machine
from windlass.planner.profiling.model_config import content_of
from windlass.storage.files import ResultCache

_MOST_KEPT = 256  # files in the folder; the oldest are deleted

# Seconds for which disturbed times hold, so that a question that is asked again has the same answer. They were measured
# beside a job or other work, or with a large error. They are not stored for good, because the next job may have all
# cores.
_DISTURBED_HOLD_S = 600.0
# The share of the other work then below which the machine has so much less of it now that times are measured again.
_MUCH_LESS = 0.5
_DISTURBED = "disturbed"  # beside the times by block: when they were measured, and what ran meanwhile

Measure = Callable[[], MeasuredBlocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingCache:
    """Stored block times of one machine. They apply to any weights of a model, because measurements use random ones."""

    folder: Path  # created when the first times are stored
    machine: Mapping[str, Any]  # its profile as JSON, and threads: new rates make it another machine
    # Returns whether no job trains on this machine. If one does before or after a measurement, its times do not hold
    # for good.
    is_alone: Callable[[], bool] = field(compare=False)
    takes_lapsed: bool = False  # times that no longer hold are used, because none are measured anew
    marker: Path | None = None  # a file that exists while blocks are measured, for who could stop this process
    # Read once, because it takes the facts of some hundred files.
    _code: list[object] = field(init=False, default_factory=lambda: code_fingerprint(Path(__file__).parent))

    def of(self, config: Any, facts: Mapping[str, Any], measure: Measure) -> dict[int, BlockTimes]:
        """Returns the times by block, and measures them if they are not stored.

        `config`: a transformers config, or one that is not loaded yet. `facts`: all else that the times depend on.
        """
        stored = self.known(config, facts)
        if stored is not None:
            return stored
        was_alone = self.is_alone()
        with self._marked():
            measured = measure()
        is_alone = was_alone and self.is_alone()
        is_busy = measured.others > MAX_OTHERS
        is_disturbed = not is_alone or is_busy or measured.standard_error > LARGEST_ERROR
        about = TimesFacts(
            standard_error=measured.standard_error,
            # With the machine's pace, the times can be used when it computes faster or slower.
            pace_s=None if is_disturbed else this_machine().now_s(),
            others=measured.others if is_busy else 0.0,
        )
        times = {block: replace(block_times, facts=about) for block, block_times in measured.times.items()}
        as_json: dict[str, Any] = {str(block): asdict(block_times) for block, block_times in times.items()}
        if is_disturbed:
            as_json[_DISTURBED] = {"at_s": time.time(), "alone": is_alone, "others": about.others}
        self._results.keep(self._fingerprint(config, facts), as_json)
        return times

    def known(self, config: Any, facts: Mapping[str, Any]) -> dict[int, BlockTimes] | None:
        """Returns the stored times, or None."""
        stored = self._results.find(self._fingerprint(config, facts)) or {}
        try:
            disturbed = stored.pop(_DISTURBED, None)
            if not (self.takes_lapsed or self._holds(disturbed)):
                return None
            times = {int(block): _times_of(saved) for block, saved in stored.items()}
        except (ValueError, TypeError, KeyError):
            return None
        return times or None

    def _holds(self, disturbed: Mapping[str, Any] | None) -> bool:
        """Returns whether stored times can be used now. What was measured beside a job is for plans beside one.

        Those of a busy machine hold until it is less busy, because another measurement would be no better.
        """
        if disturbed is None:
            return True
        if not disturbed["alone"] and self.is_alone():
            return False
        if abs(time.time() - disturbed["at_s"]) < _DISTURBED_HOLD_S:  # the clock may have been set back
            return True
        others: float = disturbed["others"]
        return others > MAX_OTHERS and this_machine().now().others > max(MAX_OTHERS, _MUCH_LESS * others)

    @contextmanager
    def _marked(self) -> Iterator[None]:
        if self.marker is not None:
            self.marker.touch()
        try:
            yield
        finally:
            if self.marker is not None:
                self.marker.unlink(missing_ok=True)

    @property
    def _results(self) -> ResultCache:
        return ResultCache(folder=self.folder, max_results=_MOST_KEPT)

    def _fingerprint(self, config: Any, facts: Mapping[str, Any]) -> str:
        hashed = [content_of(config), dict(facts), dict(self.machine), self._code]
        return hashlib.sha256(json.dumps(hashed, sort_keys=True, default=str).encode()).hexdigest()


def _times_of(saved: dict[str, Any]) -> BlockTimes:
    again, facts = saved["again"], saved["facts"]
    parts = {
        "again": None if again is None else AgainTimes(**again),
        "facts": None if facts is None else TimesFacts(**facts),
    }
    return BlockTimes(**saved | parts)
