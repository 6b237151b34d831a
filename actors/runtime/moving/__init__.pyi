"""Moves a job's states to a new division of its blocks among boxes."""

from windlass.actors.runtime.moving.division import MOVED as MOVED
from windlass.actors.runtime.moving.division import MoveSpec as MoveSpec
from windlass.actors.runtime.moving.division import blocks_text as blocks_text
from windlass.actors.runtime.moving.progress import progress_of_move as progress_of_move
from windlass.actors.runtime.moving.ray_runners import start_move_runner as start_move_runner
