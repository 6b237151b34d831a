"""Errors of a launch that fail the job, and errors that do not."""

import pytest
import ray

from tests.support.actors.specs import make_spec
from windlass.actors.job.spec import JobSpec
from windlass.actors.runtime import ray_runner as deploy
from windlass.service.dispatcher.process import RayRunners
from windlass.service.dispatcher.runners import RunnerLostError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ray.exceptions.ActorDiedError(), RunnerLostError),
        (ray.exceptions.GetTimeoutError("too slow"), RunnerLostError),
        (ray.exceptions.RaySystemError("the cluster is gone"), RunnerLostError),
        (ConnectionError("the cluster is gone"), RunnerLostError),
        (ray.exceptions.RayTaskError("start", "traceback", OSError("disk full")), ray.exceptions.RayTaskError),
        (ValueError("no such folder"), ValueError),
    ],
)
def test_launch_error_becomes_job_error_or_retry(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception]
) -> None:
    def start_runner(_spec: JobSpec) -> None:
        raise error

    monkeypatch.setattr(deploy, "start_runner", start_runner)
    with pytest.raises(expected):
        RayRunners().start(make_spec())
