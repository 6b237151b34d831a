"""The actor shells that Ray runs, and the calls of them, tested without Ray."""

import os
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.job.context import SCHEDULER, make_context
from windlass.actors.messages import ActorFailed, CommitStore, Message
from windlass.actors.runtime import ray_box
from windlass.actors.runtime.ray_box import ActorShell, niceness_of
from windlass.actors.runtime.sockets import MessageClient, MessageServer
from windlass.actors.scheduler.scheduler import ActorLostError
from windlass.engine.memory_plan.plan import PlanError
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


def test_what_the_device_computes_with_comes_first() -> None:
    beside_cpu = {
        name: niceness_of(ActorName(name), has_gpus=False) for name in ("gpu-0", "gpu-1", "optimizer-0", "ssd-0")
    }
    assert beside_cpu["gpu-0"] == beside_cpu["gpu-1"] < beside_cpu["optimizer-0"] == beside_cpu["ssd-0"]
    beside_gpu = {name: niceness_of(ActorName(name), has_gpus=True) for name in beside_cpu}
    assert beside_gpu["gpu-0"] == beside_gpu["gpu-1"] == beside_gpu["ssd-0"] < beside_gpu["optimizer-0"]


def environment_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, uses_gpu: bool) -> dict[str, str]:
    """The environment that torch would read while a shell with three threads imports its modules."""
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(ray_box, "import_for", lambda _: seen.append(dict(os.environ)))
    monkeypatch.setattr(ray_box.os, "nice", lambda _: None)
    context = make_context(make_spec(ssd_dirs=(str(tmp_path / "ssd"),)), make_layout(2048), str(tmp_path / "arena"))
    shell = ActorShell(ActorName("gpu-0"), context, 3, niceness=0, uses_gpu=uses_gpu)
    shell._importing.join()
    shell._mailbox.close()
    (environment,) = seen
    return environment


def test_threads_are_set_before_torch_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = environment_at_import(tmp_path, monkeypatch, uses_gpu=False)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_allocator_of_a_gpu_is_set_before_torch_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    environment = environment_at_import(tmp_path, monkeypatch, uses_gpu=True)
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")


def test_a_shell_passes_messages_on_and_answers_back(shell: ActorShell, scheduler: Peer, tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    journal = shell.read_journal()
    assert journal.records == ()
    assert list((tmp_path / "ssd").iterdir()) == []
    assert shell.open_space() == journal
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


# As Ray tells of an exception in an actor.
RAISED_THERE = ray.exceptions.RayTaskError("start", "Traceback", PlanError("needs 5 GiB"), "ray::ActorShell", 1, "::1")


class Calls:
    """Stands in for calls of Ray: one for each actor, whose result comes in a number of looks, or never."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **num_looks: int | None) -> None:
        self.results: dict[str, Any] = {name: f"the answer of {name}" for name in num_looks}
        self._num_looks = num_looks
        self.now_s = 0.0
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(ray_box, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def _wait(self, references: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert (num_returns, timeout > 0) == (1, True)
        self._num_looks = {name: looks and looks - 1 for name, looks in self._num_looks.items()}
        done = [reference for reference in references if self._num_looks[reference] == 0][:num_returns]
        self.now_s += 0.0 if done else timeout
        return done, [reference for reference in references if reference not in done]

    def _get(self, reference: str) -> Any:
        if isinstance(result := self.results[reference], Exception):
            raise result
        return result

    def answers(self, check_stop: Callable[[], None] = lambda: None) -> dict[ActorName, Any]:
        """Waits two minutes for the results of all calls."""
        return ray_box._answers_of({ActorName(name): name for name in self._num_looks}, 120.0, check_stop)


def test_answers_of_actors_are_in_the_order_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, gpu=5, optimizer=90, ssd=1)
    assert list(calls.answers().items()) == [(name, f"the answer of {name}") for name in ("gpu", "optimizer", "ssd")]
    assert calls.now_s > 60.0


def test_actors_that_are_not_ready_in_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, ssd=1, optimizer=None, gpu=None)
    with pytest.raises(TimeoutError, match=r"^optimizer, gpu was not ready within 120 s"):
        calls.answers()
    assert calls.now_s == pytest.approx(120.0)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (PlanError("needs 3 GiB"), PlanError, "^needs 3 GiB$"),
        (RAISED_THERE.as_instanceof_cause(), PlanError, "^needs 5 GiB$"),
        (ray.exceptions.ActorDiedError(), ActorLostError, "^the process of gpu died while it started"),
    ],
)
@pytest.mark.parametrize("others", [600, None])
def test_first_error_of_an_actor_is_raised_at_once_although_others_are_not_ready(
    monkeypatch: pytest.MonkeyPatch, result: Exception, error: type[Exception], message: str, others: int | None
) -> None:
    calls = Calls(monkeypatch, optimizer=others, gpu=5)
    calls.results["gpu"] = result
    with pytest.raises(error, match=message):
        calls.answers()
    assert calls.now_s < 10.0


def test_wait_for_answers_ends_when_the_attempt_is_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, optimizer=None)

    def check_stop() -> None:
        if calls.now_s > 10.0:
            raise InterruptedError("the job was cancelled")

    with pytest.raises(InterruptedError, match="the job was cancelled"):
        calls.answers(check_stop)
    assert calls.now_s < 12.0
