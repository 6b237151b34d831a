"""A job's processes on Ray, which count their messages and keep the spans of every step.

Ray reads its environment when it is imported, so a process imports this module after it has set that.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import ray

from benchmarks.dispatch.message_counts import CountedClient
from windlass.actors.job import SCHEDULER
from windlass.actors.runtime import ray_box
from windlass.actors.runtime import ray_runner as deploy
from windlass.actors.runtime.outbox import Outbox
from windlass.actors.runtime.ray_box import ActorShell
from windlass.actors.runtime.ray_runner import Runner
from windlass.actors.timeline import span_files
from windlass.storage.ids import ActorName


class ObservedShell(ActorShell):
    """A worker process that counts the messages of its actor."""

    def connect(self, addresses: Mapping[ActorName, str]) -> None:
        """Make the outbox, with a client that counts."""
        self._client = CountedClient(addresses)
        self._outbox = Outbox(self._client.deliver)

    def stop(self, delete_store: bool) -> None:
        """End the actor, then save its counts."""
        super().stop(delete_store)
        self._client.save(Path(self.context.spec.job_dir), self.name)


class ObservedRunner(Runner):
    """A runner that counts the scheduler's messages, and whose workers count theirs."""

    def _attempt(self) -> None:
        span_files.KEPT_STEPS = sys.maxsize
        clients: list[CountedClient] = []

        def make_client(addresses: Mapping[ActorName, str]) -> CountedClient:
            clients.append(CountedClient(addresses))
            return clients[-1]

        setattr(ray_box, "MessageClient", make_client)  # noqa: B010
        ray_box._RemoteShell = ray.remote(concurrency_groups={"lifetime": 1})(ObservedShell)
        super()._attempt()
        for client in clients:
            client.save(Path(self.spec.job_dir), SCHEDULER)


def observe_runners() -> None:
    """Make every runner that this process starts from now on an observed one."""
    deploy.Runner = ObservedRunner  # type: ignore[misc]
