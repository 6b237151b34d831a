"""The predictions for this machine's finished jobs beside what was measured, in a file of the installation.

They are facts about the machine, like the stored times of blocks beside them. So each box has its own.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.planner.predictions.confidence import TimesFrom
from windlass.storage.files import lock, write_atomically

_FILE = "predictions.jsonl"
# Number of last predictions that count. A machine and its software change.
_NUM_KEPT = 50
# Of how steps are predicted. To be increased when steps of this machine are predicted otherwise by some percent: the
# errors of predictions from before then say nothing about new ones.
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PastPrediction:
    """A finished job's prediction."""

    job_id: str
    times_from: str
    predicted_s: float
    measured_s: float  # mean of all steps
    num_steps: int
    version: int = _VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class PastPredictions:
    """The last predictions of one machine. Several processes may use one folder."""

    folder: Path  # created with the first prediction

    def errors(self, times_from: TimesFrom) -> list[float]:
        """Returns the measured over the predicted times of the last jobs whose times came from this source.

        Predictions of another version are left out.
        """
        counted = [each for each in self._all() if each.times_from == times_from and each.version == _VERSION]
        return [each.measured_s / each.predicted_s for each in counted]

    def add(self, prediction: PastPrediction) -> None:
        """Stores a prediction; again for the same job: in place of the one before. Does nothing if it cannot."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                lock(fd)
                others = [each for each in self._all() if each.job_id != prediction.job_id]
                kept = [*others, prediction][-_NUM_KEPT:]
                write_atomically(self._path, "".join(f"{json.dumps(asdict(each))}\n" for each in kept))
            finally:
                os.close(fd)

    @property
    def _path(self) -> Path:
        return self.folder / _FILE

    def _all(self) -> list[PastPrediction]:
        """Returns all predictions, the oldest first. Lines that cannot be read are left out."""
        try:
            lines = self._path.read_text().splitlines()
        except (OSError, ValueError):
            return []
        return [prediction for line in lines if (prediction := _read(line)) is not None]


def _read(line: str) -> PastPrediction | None:
    try:
        values: dict[str, Any] = json.loads(line)
        prediction = PastPrediction(**{"version": 0, **values})  # older releases wrote none
        is_valid = prediction.predicted_s > 0 and prediction.measured_s > 0
    except (ValueError, TypeError):
        return None
    return prediction if is_valid else None
