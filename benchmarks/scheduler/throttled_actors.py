"""A job's processes on Ray, slowed down as `throttle.py` says. Imported once Ray's environment is set."""

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
    """A worker process whose actor is slower than it could be."""

    def setup(self, commit: CommitRecord | None = None) -> None:
        """As the job's folder says."""
        Throttle.read(Path(self.context.spec.job_dir)).slow_actor(self.name)
        super().setup(commit)


class ThrottledRunner(Runner):
    """A runner whose workers are slower than they could be."""

    def _make_workers(self, context: JobContext, group: Any) -> dict[ActorName, str]:
        deploy._RemoteShell = ray.remote(concurrency_groups={"lifetime": 1})(ThrottledShell)
        return super()._make_workers(context, group)


def throttle_runners() -> None:
    """Runners that this process starts from now on are slowed down."""
    deploy.Runner = ThrottledRunner  # type: ignore[misc]
