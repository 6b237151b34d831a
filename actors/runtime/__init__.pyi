"""Starts actors and connects them: on Ray, or in one process."""

from windlass.actors.runtime import ray_runner as ray_runner
from windlass.actors.runtime.factory import LocalOptions as LocalOptions
from windlass.actors.runtime.local_box import LocalBox as LocalBox
from windlass.actors.runtime.local_runner import require_own_generators as require_own_generators
from windlass.actors.runtime.outbox import Outbox as Outbox
from windlass.actors.runtime.ray_box import RayBox as RayBox
from windlass.actors.runtime.ray_box import clean_up as clean_up
from windlass.actors.runtime.ray_runner import Runner as Runner
from windlass.actors.runtime.ray_runner import RunnerActor as RunnerActor
from windlass.actors.runtime.ray_runner import launch_runner as launch_runner
from windlass.actors.runtime.sockets import MessageServer as MessageServer
from windlass.actors.runtime.start_up import START_DEADLINE_S as START_DEADLINE_S
from windlass.actors.runtime.start_up import CallActors as CallActors
from windlass.actors.runtime.start_up import DuringWait as DuringWait
from windlass.actors.runtime.start_up import decide as decide
from windlass.actors.runtime.start_up import decisions_path as decisions_path
from windlass.actors.runtime.start_up import free_memory_of as free_memory_of
from windlass.actors.runtime.start_up import plan_attempt as plan_attempt
from windlass.actors.runtime.start_up import recovery_of as recovery_of
from windlass.actors.runtime.start_up import start_actors as start_actors
from windlass.actors.runtime.start_up import waits_for as waits_for
