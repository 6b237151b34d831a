"""Transfers of a job that was taken back while their thread was blocked: they begin anew if the job comes again."""

import threading
import time
from collections.abc import Callable
from typing import Any

from tests.support.service.cluster_stage import Cluster
from tests.unit.service.cluster.box.test_agent import run, save_checkpoint
from windlass.service.cluster.box.transfers import Sendings, Takings
from windlass.storage.sql.repositories.boxes import JobReport, MirrorRepository

_TIMEOUT_S = 10.0


class Gate:
    """A call that blocks until the gate is opened."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._is_open = threading.Event()
        self._was_reached = threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        self._was_reached.set()
        assert self._is_open.wait(_TIMEOUT_S)
        return self._call(*arguments)

    def wait(self) -> None:
        assert self._was_reached.wait(_TIMEOUT_S)

    def open(self) -> None:
        self._is_open.set()


def finish(transfers: Takings | Sendings, job_id: str) -> None:
    task = transfers._transfers[job_id].task
    assert task is not None
    task.exception(timeout=_TIMEOUT_S)


def test_take_job_that_is_given_again_after_its_end_is_fetched(cluster: Cluster) -> None:
    job_id = cluster.prepare()
    cluster.give(job_id)
    takings = cluster.agent._takings
    cluster.link.job = gate = Gate(cluster.link.job)  # type: ignore[method-assign, assignment]
    assert takings.take(job_id) is None
    gate.wait()
    assert not takings.end(job_id)
    assert takings.take(job_id) is None  # it is given again while the thread of the first time is blocked
    gate.open()
    finish(takings, job_id)
    deadline_s = time.monotonic() + _TIMEOUT_S
    while (row := takings.take(job_id)) is None:
        assert time.monotonic() < deadline_s
        assert "stopped" not in takings.texts()[job_id]
        finish(takings, job_id)
    assert row["id"] == job_id


def test_go_on_with_a_job_that_is_counted_on_again_after_its_end_sends_it(cluster: Cluster) -> None:
    job_id = run(cluster)
    sendings = cluster.agent._sendings
    save_checkpoint(cluster, job_id, 1, kept=[1])
    cluster.box.tick()
    cluster.link.offset = gate = Gate(cluster.link.offset)  # type: ignore[method-assign, assignment]
    sendings.go_on(report(cluster, job_id))
    gate.wait()
    assert not sendings.end(job_id)
    gate.open()
    finish(sendings, job_id)
    sendings.go_on(report(cluster, job_id))
    finish(sendings, job_id)
    assert sendings.sent_checkpoints(report(cluster, job_id))


def report(cluster: Cluster, job_id: str) -> JobReport:
    with cluster.box.database.read() as session:
        return MirrorRepository(session).report(cluster.box.job(job_id), after=0)
