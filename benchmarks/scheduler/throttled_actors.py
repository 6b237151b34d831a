"""A job's throttled processes on Ray; see `throttle.py`. Import it only after Ray's environment is set."""

from pathlib import Path

import ray

from benchmarks.scheduler.throttle import Throttle
from windlass.actors.runtime import ray_box
from windlass.actors.runtime import ray_runner as deploy
from windlass.actors.runtime.ray_box import ActorShell
from windlass.actors.runtime.ray_runner import Runner
from windlass.storage.store import CommitRecord


class ThrottledShell(ActorShell):
    """A worker process with a throttled actor."""

    def start(self, commit: CommitRecord | None) -> None:
        """Starts the actor with the rates in the job's folder."""
        Throttle.read(Path(self.context.spec.job_dir)).slow_actor(self.name)
        super().start(commit)


class ThrottledRunner(Runner):
    """A runner with throttled workers."""

    def _attempt(self) -> None:
        ray_box._RemoteShell = ray.remote(concurrency_groups={"lifetime": 1})(ThrottledShell)
        super()._attempt()


def throttle_runners() -> None:
    """Throttles the workers of all runners that this process starts from now on."""
    deploy.Runner = ThrottledRunner  # type: ignore[misc]
