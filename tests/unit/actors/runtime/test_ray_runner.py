"""The actor shells that Ray runs, tested without Ray."""

import os
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.job.context import SCHEDULER, make_context
from windlass.actors.messages import ActorFailed, CommitStore, Message
from windlass.actors.runtime import ray_runner as deploy
from windlass.actors.runtime.ray_runner import ActorShell, niceness_of, runner_name
from windlass.actors.runtime.sockets import MessageClient, MessageServer
from windlass.actors.scheduler.scheduler import ActorLostError
from windlass.storage.ids import ActorName, Attempt, JobId, Step
from windlass.storage.memory.arena import Arena
from windlass.storage.ssd.volume import Volume

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if a test starts a cluster, and undoes a shell's settings of its process."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a unit test called ray.init")

    monkeypatch.setattr(ray, "init", refuse)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    yield
    assert not ray.is_initialized()


class Peer:
    """A stand-in for a shell's scheduler: it keeps the messages it receives, and can send messages to the shell."""

    def __init__(self) -> None:
        self.received: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.mailbox = MessageServer(self._keep)

    def _keep(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.received.put(message)

    def send(self, shell: ActorShell, message: Message) -> None:
        MessageClient({shell.name: shell.address()}).deliver(shell.name, [message])

    def next_failure(self) -> ActorFailed:
        message = self.received.get(timeout=WAIT_S)
        assert isinstance(message, ActorFailed)
        return message


@pytest.fixture
def scheduler() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.mailbox.close()


@pytest.fixture
def shell(tmp_path: Path, scheduler: Peer) -> ActorShell:
    """A shell of the first SSD server of a small job whose directories do not exist yet."""
    spec = make_spec(ssd_dirs=(str(tmp_path / "ssd"),))
    context = make_context(spec, make_layout(2048, 5000), str(tmp_path / "arena"))
    Arena.create(context.arena_path, context.plan.arena_nbytes).close()
    shell = ActorShell(ActorName("ssd-0"), context, 3, niceness=0, uses_gpu=False)
    shell.connect({SCHEDULER: scheduler.mailbox.address})
    return shell


def jobs_on(directory: Path) -> set[str]:
    volume = Volume.open(directory)
    try:
        return set(volume.allocations())
    finally:
        volume.close()


def commit(step: int) -> CommitStore:
    return CommitStore(
        job=JobId("ftjob-1"), step=Step(step), attempt=Attempt(2), states_step=Step(step), trainer_state="{}"
    )


def test_a_runner_is_named_by_job_and_attempt() -> None:
    assert runner_name(JobId("ftjob-7"), Attempt(3)) == "job-ftjob-7-3"


def test_what_the_device_computes_with_comes_first() -> None:
    beside_cpu = {name: niceness_of(ActorName(name), has_gpus=False) for name in ("gpu-0", "optimizer-0", "ssd-0")}
    assert beside_cpu["gpu-0"] < beside_cpu["optimizer-0"] == beside_cpu["ssd-0"]
    beside_gpu = {name: niceness_of(ActorName(name), has_gpus=True) for name in beside_cpu}
    assert beside_gpu["gpu-0"] == beside_gpu["ssd-0"] < beside_gpu["optimizer-0"]


def test_threads_are_set_before_torch_is_imported(shell: ActorShell) -> None:
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"


def test_allocator_of_a_gpu_is_set_before_torch_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    context = make_context(make_spec(ssd_dirs=(str(tmp_path / "ssd"),)), make_layout(2048), str(tmp_path / "arena"))
    ActorShell(ActorName("ssd-0"), context, 1, niceness=0, uses_gpu=True)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")


def test_a_shell_passes_messages_on_and_answers_back(shell: ActorShell, scheduler: Peer, tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    assert shell.open_space() == []
    shell.start(None)
    scheduler.send(shell, commit(0))
    failed = scheduler.next_failure()
    shell.stop(False)
    assert (failed.actor, failed.step) == ("ssd-0", 0)
    assert "has not been written" in failed.error
    assert jobs_on(tmp_path / "ssd") == {"ftjob-1"}
    shell.wait_until_stopped()


def test_an_ssd_server_deletes_its_store_when_told(shell: ActorShell, tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    shell.open_space()
    shell.start(None)
    shell.stop(True)
    assert jobs_on(tmp_path / "ssd") == set()


def test_an_error_at_the_start_reaches_the_caller(shell: ActorShell) -> None:
    with pytest.raises(ValueError, match=r"SSD path .* is neither a directory nor a block device"):
        shell.open_space()


def test_a_post_that_raises_is_told_to_the_scheduler(shell: ActorShell, scheduler: Peer, tmp_path: Path) -> None:
    """No caller waits for the call that brought the message."""
    (tmp_path / "ssd").mkdir()
    shell.open_space()
    shell.start(None)
    shell.actor.stop(delete_store=True)
    scheduler.send(shell, commit(5))
    failed = scheduler.next_failure()
    assert (failed.actor, failed.step) == ("ssd-0", 5)
    text = "ssd-0 of job ftjob-1 is stopped and takes no messages"
    assert failed.error == f"RuntimeError: {text} (at commit store of step 5)"
    assert failed.detail.startswith("Traceback")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ray.exceptions.GetTimeoutError("not ready"), "optimizer-0 was not ready within 120 s"),
        (ray.exceptions.ActorDiedError(), "the process of optimizer-0 died while it started"),
    ],
)
def test_actor_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def get(reference: str, timeout: float) -> Any:
        assert timeout > 0
        if reference == "second":
            raise error
        return f"the {reference} answer"

    monkeypatch.setattr(ray, "get", get)
    assert deploy._answers_of({ActorName("gpu-0"): "first"}) == {"gpu-0": "the first answer"}
    with pytest.raises((TimeoutError, ActorLostError), match=message):
        deploy._answers_of({ActorName("gpu-0"): "first", ActorName("optimizer-0"): "second"})
