"""The runner's own part of an attempt, without Ray."""

import contextlib
import dataclasses
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.job.context import make_context, optimizer_name
from windlass.actors.job.journal import Journal, read_journal
from windlass.actors.lifecycle.attempt_lock import begin_attempt, close_attempt, has_begun, last_sign_of_life
from windlass.actors.lifecycle.report_timer import StartReport
from windlass.actors.messages import KernelChosen, Message, UserMessage
from windlass.actors.runtime import ray_box, start_up
from windlass.actors.runtime import ray_runner as deploy
from windlass.actors.runtime.ray_box import RayBox
from windlass.actors.runtime.ray_runner import Runner, runner_name
from windlass.actors.scheduler.scheduler import CANCELLED, INTERRUPTED, PAUSED, ActorLostError
from windlass.actors.worker_policy.stages import Stage
from windlass.storage.ids import ActorName, Attempt, JobId, Kernel, Step
from windlass.storage.memory.capacity import InsufficientSpaceError


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))
    return Runner(make_spec(job_dir=str(tmp_path)))


def test_a_runner_is_named_by_job_and_attempt() -> None:
    assert runner_name(JobId("ftjob-7"), Attempt(3)) == "job-ftjob-7-3"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ActorLostError("the process of ssd-0 died"), INTERRUPTED),
        (ray.exceptions.ActorDiedError(), INTERRUPTED),
        (TimeoutError("ssd-0 was not ready within 120 s"), INTERRUPTED),
        (ValueError("the model has no weights"), "failed"),
        (RuntimeError("a bug"), "failed"),
        (OSError(errno.ENOSPC, "No space left on device"), INTERRUPTED),
        (InsufficientSpaceError("the arena", "/dev/shm", 2, 1, "stop other jobs"), INTERRUPTED),  # in a second attempt
    ],
)
def test_a_process_that_dies_or_hangs_while_the_attempt_starts_is_no_failure_of_the_job(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: str
) -> None:
    def attempt() -> None:
        raise error

    monkeypatch.setattr(runner, "_attempt", attempt)
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert (outcome.kind, outcome.data["status"]) == ("outcome", status)


def test_job_that_needs_more_resources_than_exist_fails_at_once(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt() -> None:
        raise InsufficientSpaceError("the arena", "/dev/shm", 2, 1, "stop other jobs")

    runner.spec = dataclasses.replace(runner.spec, attempt=Attempt(1))
    monkeypatch.setattr(runner, "_attempt", attempt)
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert outcome.data["status"] == "failed"


@pytest.mark.parametrize("comes_in_time", [True, False])
def test_outcome_is_written_once_there_is_disk_space(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_in_time: bool
) -> None:
    tries: list[float] = []

    def append_outcome(self: Journal, *arguments: object, **data: object) -> None:
        tries.append(deploy.time.monotonic())
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        journal_append(self, *arguments, **data)  # type: ignore[arg-type]

    journal_append = Journal.append_outcome
    monkeypatch.setattr(Journal, "append_outcome", append_outcome)
    monkeypatch.setattr(deploy, "_ROOM_DEADLINE_S", 60.0 if comes_in_time else -1.0)
    monkeypatch.setattr(deploy, "_ROOM_TRY_S", 0.0)
    if comes_in_time:
        runner._tell_end(INTERRUPTED, "the disk is full")
        (outcome,) = read_journal(tmp_path / "journal.jsonl")
        assert (outcome.seq, outcome.data["status"]) == (1, INTERRUPTED)
    else:
        with pytest.raises(OSError, match="No space left"):
            runner._tell_end(INTERRUPTED, "the disk is full")
        assert len(tries) == 1


def test_a_runner_that_waits_for_room_gives_no_sign_of_life(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service can then tell it from a runner that trains, although nothing could be written on the full disk."""
    signs: list[bool] = []

    def append_outcome(self: Journal, *arguments: object, **data: object) -> None:
        signs.append(runner._waits_for_room)
        if len(signs) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "append_outcome", append_outcome)
    monkeypatch.setattr(deploy, "_ROOM_TRY_S", 0.0)
    assert deploy._ROOM_DEADLINE_S < 60, "a runner that is silent for longer is taken to hang"
    runner._tell_end(INTERRUPTED, "the disk is full")
    assert signs == [False, True]
    pulses: list[int] = []
    monkeypatch.setattr(deploy, "tell_alive", lambda *_: bool(pulses.append(1)))

    def wake(_: float) -> None:
        runner._waits_for_room = False

    monkeypatch.setattr(deploy.time, "sleep", wake)
    runner._pulse()
    assert pulses == [1]


def test_messages_before_scheduler_exists_reach_it_in_order(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors send messages while they are set up, and none of them waits for the others."""
    received: list[Message] = []

    class Receiver:
        def __init__(self, *_: object, **__: object) -> None:
            self.post = received.append

    monkeypatch.setattr("windlass.actors.runtime.ray_runner.Scheduler", Receiver)
    chosen = [
        KernelChosen(job=runner.spec.job, step=Step(0), actor=optimizer_name(index), kernel=Kernel.FUSED)
        for index in range(3)
    ]
    runner._post(chosen[:1])
    runner._post(chosen[1:2])
    assert received == []
    context = make_context(runner.spec, make_layout(5000), "/dev/shm/arena")
    runner._make_scheduler(context, lambda to, message: None, None, lambda: None)
    runner._post(chosen[2:])
    assert received == chosen


def test_an_announcement_is_in_the_journal_before_there_is_a_scheduler(runner: Runner, tmp_path: Path) -> None:
    runner._post(2 * [UserMessage(job=runner.spec.job, step=Step(0), text="Compiling")])  # two actors say the same
    (told,) = read_journal(tmp_path / "journal.jsonl")
    assert (told.kind, told.level, told.message, told.seq) == ("message", "info", "Compiling", 1)
    context = make_context(runner.spec, make_layout(5000), "/dev/shm/arena")
    runner._make_scheduler(context, lambda to, message: None, None, lambda: None)
    runner._post([UserMessage(job=runner.spec.job, step=Step(0), text="late")])
    assert len(list(read_journal(tmp_path / "journal.jsonl"))) == 1


def test_the_attempt_has_begun_when_start_returns(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_attempt", lambda: None)
    runner.start()
    assert has_begun(tmp_path, Attempt(2))
    assert not close_attempt(tmp_path, Attempt(2))
    os.close(runner._attempt_lock)
    assert close_attempt(tmp_path, Attempt(2))


def test_runner_gives_signs_of_life_until_it_ends(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "_PULSE_S", 0.01)
    monkeypatch.setattr(runner, "_attempt", lambda: None)
    runner.start()
    for _ in range(3):
        os.utime(tmp_path / "attempt-2.lock", (0, 0))
        while last_sign_of_life(tmp_path, Attempt(2)) == 0:
            time.sleep(0.01)
    os.close(runner._attempt_lock)
    assert close_attempt(tmp_path, Attempt(2))


def test_a_launch_of_a_runner_that_ends_before_it_answers_is_no_failed_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(job_dir=str(tmp_path))
    launch_one_that_dies(monkeypatch)

    os.close(begin_attempt(tmp_path, spec.attempt))
    deploy.start_runner(spec)


def test_a_launch_of_a_runner_that_dies_before_it_begins_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_one_that_dies(monkeypatch)
    with pytest.raises(ray.exceptions.ActorDiedError):
        deploy.start_runner(make_spec(job_dir=str(tmp_path)))


def launch_one_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Ray answer for a runner whose process is gone."""

    def get(_reference: object, timeout: float) -> None:
        raise ray.exceptions.ActorDiedError

    handle = SimpleNamespace(start=SimpleNamespace(remote=lambda: None))
    actor_class = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _spec: handle))
    monkeypatch.setattr(ray, "remote", lambda _class: actor_class)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0" * 56))
    monkeypatch.setattr(ray, "get", get)


class Opened:
    """Stands in for what an attempt opens: its arena, its placement group and its actors. Tells what was closed."""

    def __init__(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.closed: list[str] = []
        self.is_free: Callable[[], bool] = lambda: True  # the device
        self.run: Callable[[], dict[str, Any]] = lambda: {"status": PAUSED}  # the scheduler
        layout_file = Path(runner.spec.job_dir) / "layout.json"
        layout_file.write_text(make_layout(5000).to_json())
        runner.spec = dataclasses.replace(runner.spec, layout_file=str(layout_file))
        arena = SimpleNamespace(close=self._close("arena"), unlink=self._close("arena file"))
        group = SimpleNamespace(wait=lambda _timeout_s: self.is_free())
        self.context = SimpleNamespace(spec=runner.spec)
        monkeypatch.setattr(ray_box, "free_memory_of", lambda _: 1 << 30)
        monkeypatch.setattr(ray_box, "plan_attempt", lambda *_, **__: self.context)
        monkeypatch.setattr(ray_box, "create_arena", lambda *_: arena)
        monkeypatch.setattr(ray_box, "num_gpus_here", lambda: 0)
        monkeypatch.setattr(ray_box, "devices_here", lambda *_, **__: group)
        monkeypatch.setattr(ray_box, "remove_placement_group", lambda _: self._close("group")())
        monkeypatch.setattr(RayBox, "_make_workers", self._make_workers)
        monkeypatch.setattr(RayBox, "_connect", lambda *_: None)
        monkeypatch.setattr(deploy, "start_actors", lambda *_: None)
        monkeypatch.setattr(runner, "_make_scheduler", lambda *_: SimpleNamespace(run=lambda: self.run()))
        monkeypatch.setattr(ray_box, "_STOP_CHECK_S", 0.0)
        monkeypatch.setattr(ray, "kill", lambda actor: actor is not None and self._close(actor.name)())

    def _close(self, name: str) -> Callable[[], None]:
        return lambda: self.closed.append(name)

    @staticmethod
    def _make_workers(box: RayBox, *_: object, **__: object) -> dict[ActorName, str]:
        box._workers = {ActorName(name): SimpleNamespace(name=name) for name in ("ssd-0", "gpu-0")}
        return {}


ALL_CLOSED = ["gpu-0", "ssd-0", "group", "arena", "arena file"]


@pytest.fixture
def opened(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Opened:
    return Opened(runner, monkeypatch)


@pytest.mark.parametrize(("stop", "status"), [("cancel", CANCELLED), ("pause", PAUSED)])
def test_attempt_that_is_stopped_while_it_waits_for_a_device_ends_at_once(
    runner: Runner, opened: Opened, tmp_path: Path, stop: str, status: str
) -> None:
    def is_free() -> bool:
        getattr(runner, stop)()
        return False

    opened.is_free = is_free
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert (outcome.kind, outcome.data) == ("outcome", {"status": status, "error": None, "model_dir": None})
    assert opened.closed == ["group"]  # there are no processes yet, and no arena


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, "no device came free within 0 s; another job holds it"),
        (4, "not all 4 devices came free within 0 s; other jobs hold some of them"),
    ],
)
def test_attempt_that_gets_no_devices_in_time_says_how_many_it_waits_for(
    runner: Runner, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, expected: str
) -> None:
    opened.context.spec = dataclasses.replace(runner.spec, num_ranks=num_ranks)
    opened.is_free = lambda: False
    monkeypatch.setattr(ray_box, "START_DEADLINE_S", 0.0)
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert (outcome.data["status"], outcome.message) == (INTERRUPTED, expected)


def test_a_runner_of_one_box_refuses_a_job_with_stages(runner: Runner, tmp_path: Path) -> None:
    runner.spec = dataclasses.replace(runner.spec, stages=(Stage(0, 2), Stage(2, 5)))
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert outcome.data["status"] == "failed"
    assert outcome.message == "the job has 2 stages, and its runner knows no other boxes"


def test_stop_at_the_start_is_left_to_the_scheduler_if_the_model_is_complete(runner: Runner, tmp_path: Path) -> None:
    runner.spec = dataclasses.replace(runner.spec, output_dir=str(tmp_path / "out"))
    runner.cancel()
    with pytest.raises(deploy._StoppedAtStartError):
        runner._check_stop()
    (tmp_path / "out").mkdir()
    runner._check_stop()


def test_long_waits_of_a_starting_attempt_are_told(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_s = iter((0.0, 0.0, 2.0, 6.0, 8.0))
    monkeypatch.setattr(runner, "_waits", StartReport(runner._tell_wait, clock=lambda: next(times_s)))
    for _ in range(4):
        runner._during_wait("Allocating 40 GiB of host memory")
    runner.pause()
    with pytest.raises(deploy._StoppedAtStartError):
        runner._during_wait("Allocating 40 GiB of host memory")
    (message,) = read_journal(tmp_path / "journal.jsonl")
    assert (message.kind, message.message) == ("message", "Allocating 40 GiB of host memory")


def test_attempt_that_ended_keeps_its_outcome_and_closes_the_rest_if_a_clean_up_fails(
    runner: Runner, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> dict[str, Any]:
        outcome = {"status": INTERRUPTED, "error": None, "model_dir": None}
        with contextlib.closing(Journal(tmp_path / "journal.jsonl", runner.spec.attempt)) as journal:
            journal.append_outcome(message="the process of ssd-0 died", **outcome)  # type: ignore[arg-type]
        return outcome

    opened.run = run
    monkeypatch.setattr(ray_box, "remove_placement_group", fail_to_clean_up)
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert outcome.message == "the process of ssd-0 died"
    assert opened.closed == [name for name in ALL_CLOSED if name != "group"]
    assert "ValueError: the placement group is gone" in (tmp_path / "error.txt").read_text()


def fail_to_clean_up(_: object) -> None:
    raise ValueError("the placement group is gone")


def test_attempt_whose_start_and_clean_up_fail_ends_with_the_error_of_the_start(
    runner: Runner, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ActorLostError("the process of gpu-0 died while it started")

    monkeypatch.setattr(RayBox, "_connect", fail)
    monkeypatch.setattr(ray_box, "remove_placement_group", fail_to_clean_up)
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert (outcome.data["status"], outcome.message) == (INTERRUPTED, "the process of gpu-0 died while it started")
    assert "ValueError: the placement group is gone" in (tmp_path / "error.txt").read_text()


@pytest.mark.parametrize(("stop", "status"), [("cancel", CANCELLED), ("pause", PAUSED)])
def test_attempt_that_is_stopped_at_its_start_keeps_its_outcome_if_a_clean_up_fails(
    runner: Runner, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str, status: str
) -> None:
    def is_free() -> bool:
        getattr(runner, stop)()
        return False

    opened.is_free = is_free
    monkeypatch.setattr(ray_box, "remove_placement_group", fail_to_clean_up)
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert (outcome.data["status"], outcome.data["error"]) == (status, None)
    assert "ValueError: the placement group is gone" in (tmp_path / "error.txt").read_text()


def create_arena_of(runner: Runner, monkeypatch: pytest.MonkeyPatch, allocate: Callable[..., int]) -> None:
    """Lets the attempt create an arena in the job's folder, whose pages `allocate` allocates."""
    path = str(Path(runner.spec.job_dir) / "windlass-ftjob-1-1-1.arena")
    context = SimpleNamespace(spec=runner.spec, arena_path=path, plan=SimpleNamespace(arena_nbytes=4096))
    monkeypatch.setattr(ray_box, "plan_attempt", lambda *_, **__: context)
    monkeypatch.setattr(ray_box, "create_arena", start_up.create_arena)
    monkeypatch.setattr("windlass.storage.memory.arena.allocate_pages", allocate)


def test_first_attempt_whose_room_is_lost_before_its_arena_is_created_is_repeated(
    runner: Runner, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    runner.spec = dataclasses.replace(runner.spec, attempt=Attempt(1))
    create_arena_of(runner, monkeypatch, allocate)
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert outcome.data["status"] == INTERRUPTED
    assert "4.00 KiB needed" in outcome.message
    assert "the job's own processes" in outcome.message
    assert list(tmp_path.glob("*.arena")) == []


def test_attempt_that_is_cancelled_while_its_arena_is_created_ends_at_once(
    runner: Runner, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object, check_stop: Callable[[], None], **__: object) -> int:
        check_stop()
        runner.cancel()
        check_stop()
        raise AssertionError("the allocation goes on")

    create_arena_of(runner, monkeypatch, allocate)
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert (outcome.data["status"], outcome.data["error"]) == (CANCELLED, None)
    assert list(tmp_path.glob("*.arena")) == []


def test_actor_that_cannot_be_killed_keeps_none_of_the_others_alive(
    runner: Runner, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = ray.kill

    def refuse(actor: Any) -> None:
        if actor is not None and actor.name == "ssd-0":
            raise ValueError("there is no such actor")
        kill(actor)

    monkeypatch.setattr(ray, "kill", refuse)
    opened.run = lambda: {"status": INTERRUPTED}
    runner._run()
    assert opened.closed == [name for name in ALL_CLOSED if name != "ssd-0"]


def test_attempt_whose_workers_do_not_start_removes_its_arena(
    runner: Runner, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Ray does not answer")

    monkeypatch.setattr(RayBox, "_connect", fail)
    runner._run()
    (outcome,) = read_journal(tmp_path / "journal.jsonl")
    assert (outcome.data["status"], outcome.message) == ("failed", "RuntimeError: Ray does not answer")
    assert opened.closed == ALL_CLOSED


def test_actors_that_do_not_stop_cleanly_are_in_the_file_of_errors(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(reference: str) -> None:
        if reference == "stop of ssd-0":
            raise OSError(errno.EIO, "the store could not be deleted")

    def stop_of(name: str) -> Any:
        return SimpleNamespace(stop=SimpleNamespace(remote=lambda _is_over: f"stop of {name}"))

    context: Any = SimpleNamespace(spec=runner.spec)
    box = RayBox(context, 0, lambda: None)
    box._workers = {ActorName(name): stop_of(name) for name in ("ssd-0", "optimizer-0", "gpu-0")}
    monkeypatch.setattr(ray, "wait", lambda references, **_: (references[:2], references[2:]))
    monkeypatch.setattr(ray, "get", get)
    box.stop_actors(is_over=True)
    assert (tmp_path / "error.txt").read_text().splitlines() == [
        f"attempt 2: gpu-0 did not stop within {runner.spec.deadline_s:g} s",
        "attempt 2: ssd-0 did not stop cleanly: [Errno 5] the store could not be deleted",
    ]
