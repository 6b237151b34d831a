"""A job's throttled processes on Ray; see `throttle.py`. Import it only after Ray's environment is set."""

from pathlib import Path
from typing import Any

import ray

from benchmarks.scheduler.throttle import Throttle
from windlass.actors.job import JobContext
from windlass.actors.runtime import ray_runner as deploy
from windlass.actors.runtime.ray_runner import ActorShell, Runner
from windlass.storage.ids import ActorName
from windlass.storage.store import CommitRecord


class ThrottledShell(ActorShell):
    """A worker process with a throttled actor."""

    def start(self, commit: CommitRecord | None) -> None:
        """Starts the actor with the rates in the job's folder."""
        Throttle.read(Path(self.context.spec.job_dir)).slow_actor(self.name)
        super().start(commit)


class ThrottledRunner(Runner):
    """A runner with throttled workers."""

    def _make_workers(self, context: JobContext, group: Any, *, has_gpus: bool) -> dict[ActorName, str]:
        deploy._RemoteShell = ray.remote(concurrency_groups={"lifetime": 1})(ThrottledShell)
        return super()._make_workers(context, group, has_gpus=has_gpus)


def throttle_runners() -> None:
    """Throttles the workers of all runners that this process starts from now on."""
    deploy.Runner = ThrottledRunner  # type: ignore[misc]
