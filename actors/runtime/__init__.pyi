"""Starts actors and connects them: on Ray, or in one process."""

from windlass.actors.runtime import ray_runner as ray_runner
from windlass.actors.runtime.factory import LocalOptions as LocalOptions
from windlass.actors.runtime.local_box import LocalBox as LocalBox
from windlass.actors.runtime.local_runner import ConnectBoxes as ConnectBoxes
from windlass.actors.runtime.local_runner import require_own_generators as require_own_generators
from windlass.actors.runtime.start_up import START_DEADLINE_S as START_DEADLINE_S
from windlass.actors.runtime.start_up import CallActors as CallActors
from windlass.actors.runtime.start_up import start_actors as start_actors
