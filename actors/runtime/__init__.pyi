"""Starts actors and connects them: on Ray, or in one process."""

from windlass.actors.runtime import ray_runner as ray_runner
