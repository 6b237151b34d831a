"""The runners of an attempt that moves a job's states to a new division of its blocks, with a Ray on each box.

Each runner does its box's part in its own process. It starts no actors, and needs no device.
"""

import time
import traceback
from pathlib import Path

from windlass.actors.runtime import Runner, RunnerActor, launch_runner
from windlass.actors.runtime.boxes import LinkConfig
from windlass.actors.runtime.moving.division import MOVED, MoveSpec
from windlass.actors.runtime.moving.lead import Moved
from windlass.actors.runtime.moving.linked_move import move_over_link
from windlass.actors.runtime.moving.progress import MoveProgress
from windlass.storage.ids import Attempt
from windlass.storage.memory import is_out_of_space, may_find_room_later


class LeadMoveRunner(Runner):
    """The runner of a job's first box in a move. It writes to the journal what is moved, and the outcome."""

    def __init__(self, move: MoveSpec, config: LinkConfig) -> None:
        super().__init__(move.any)
        self._move, self._config = move, config

    def _attempt(self) -> None:
        layout = self._read_layout()
        texts = [str(each) for each in self._move.moved(layout)]
        job_dir, attempt = Path(self._move.any.job_dir), self._move.any.attempt
        progress = MoveProgress(job_dir, attempt, ", ".join(texts), self._move.states_nbytes(layout))

        def tell_progress(nbytes: int) -> None:
            progress.note(nbytes)
            if (text := progress.text(nbytes, time.monotonic())) is not None:
                with self._lock:
                    self._tell_message(text)

        try:
            moved = move_over_link(
                self._move, layout, self._config.listen(), check_stop=self._check_stop, on_progress=tell_progress
            )
        except Exception as error:
            if is_out_of_space(error) and not may_find_room_later(error, Attempt(1)):
                raise ValueError(str(error)) from error  # the new states never had their room, so waiting finds none
            raise
        assert moved is not None, "this is the first box"
        self._tell_end(MOVED, _end_text(moved))


class BoxMoveRunner(RunnerActor):
    """The runner of another box in a move. Why it ends is in the box's file of errors, and the first box is told."""

    def __init__(self, move: MoveSpec, config: LinkConfig) -> None:
        super().__init__(move.any)
        self._move, self._config = move, config

    def _attempt(self) -> None:
        move_over_link(self._move, self._read_layout(), self._config.listen())

    def _fail(self, error: Exception) -> None:
        self._note_error(traceback.format_exc())


def start_move_runner(move: MoveSpec, config: LinkConfig) -> None:
    """Launches one box's part of a move on the caller's node; Ray must be connected. Returns when it has begun.

    The runner is named like that of an attempt that trains, so the same calls find it. Only the first box's can be
    cancelled and paused.
    """
    launch_runner(BoxMoveRunner if move.box else LeadMoveRunner, move.any, move, config)


def _end_text(moved: Moved) -> str:
    if moved.step is None:
        return "The job's states are where its new division wants them"
    blocks = ", ".join(map(str, moved.blocks)) or "to other SSDs of its boxes"
    return f"Moved the states of step {moved.step}: {blocks}"
