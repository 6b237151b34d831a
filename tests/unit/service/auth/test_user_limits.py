"""The limits of a key that administrators set: priorities, numbers of jobs, files and webhook endpoints."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.service.api_client import context_of, make_model
from tests.support.service.dispatcher_stage import AtOnce, Stage
from tests.support.service.keyed import World, keyed_world
from windlass.service.data import disk_usage
from windlass.service.dispatcher.housekeeping import Housekeeping
from windlass.service.installation.home import node_of
from windlass.service.installation.settings import Settings
from windlass.storage.ids import JobId
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.api_keys import KeyRepository, Role
from windlass.storage.ssd.volume import Volume
from windlass.storage.ssd.volume_format import UNIT_NBYTES, Demand

_JOBS = "/v1/fine_tuning/jobs"


def _submit(world: World, who: str, **windlass: Any) -> Any:
    body = {"model": "tiny", "training_file": world.things[who].file_id, "windlass": windlass}
    return world.ask(who, "POST", _JOBS, json=body)


def _refusal(response: Any) -> tuple[int, str | None, str | None]:
    error = response.json().get("error", {})
    return response.status_code, error.get("code"), error.get("param")


def _limit(world: World, who: str, **limits: Any) -> None:
    with context_of(world.client).database.write() as session:
        KeyRepository(session).set_limits(world.key_ids[who], limits)


def test_users_may_lower_priority_but_not_raise_it(settings: Settings) -> None:
    with keyed_world(settings) as world:
        refused = _submit(world, "alice", priority=-1)
        assert _refusal(refused) == (403, "priority_not_allowed", "windlass.priority")
        assert "from 0 to 1000, got -1; the administrator sets it with `windlass keys limit`" in refused.text
        assert _submit(world, "alice", priority=5).status_code == 200
        assert _submit(world, "root", priority=-1000).status_code == 200


def test_a_key_may_have_another_range_of_priorities(settings: Settings) -> None:
    with keyed_world(settings) as world:
        _limit(world, "alice", most_urgent_priority=-10)
        assert _submit(world, "alice", priority=-10).status_code == 200
        assert _refusal(_submit(world, "alice", priority=-11))[1] == "priority_not_allowed"
        assert _refusal(_submit(world, "bob", priority=-10))[1] == "priority_not_allowed"


def test_a_user_has_so_many_jobs_that_wait(settings: Settings) -> None:
    few = settings.model_copy(update={"max_waiting_jobs_per_user": 2})  # the user has one already
    with keyed_world(few) as world:
        job = _submit(world, "alice").json()["id"]
        refused = _submit(world, "alice")
        assert _refusal(refused) == (403, "job_quota_exceeded", None)
        assert "you have 2 jobs that wait or are paused; your limit is 2" in refused.text
        assert _submit(world, "bob").status_code == 200
        assert _submit(world, "root").status_code == 200
        assert world.ask("alice", "POST", f"{_JOBS}/{job}/pause").status_code == 200
        assert _refusal(_submit(world, "alice"))[1] == "job_quota_exceeded", "a paused one counts"
        assert world.ask("alice", "POST", f"{_JOBS}/{job}/cancel").status_code == 200
        assert _submit(world, "alice").status_code == 200


def test_a_request_that_is_sent_again_is_no_further_job(settings: Settings) -> None:
    with keyed_world(settings.model_copy(update={"max_waiting_jobs_per_user": 2})) as world:
        body = {"model": "tiny", "training_file": world.things["alice"].file_id}
        answers = [world.ask("alice", "POST", _JOBS, json=body, headers={"Idempotency-Key": "once"}) for _ in range(3)]
        assert len({answer.json()["id"] for answer in answers}) == 1


def test_a_user_has_so_many_webhook_endpoints(settings: Settings) -> None:
    body = {"name": "mine", "url": "https://192.0.2.2/x", "event_types": ["fine_tuning.job.failed"]}
    with keyed_world(settings.model_copy(update={"webhook_private_addresses": True})) as world:
        _limit(world, "alice", max_webhook_endpoints=2)  # the user has one already
        path = "/v1/webhook_endpoints"
        assert world.ask("alice", "POST", path, json=body).status_code == 200
        refused = world.ask("alice", "POST", path, json=body)
        assert _refusal(refused) == (403, "webhook_quota_exceeded", None)
        assert world.ask("bob", "POST", path, json=body).status_code == 200


def test_a_key_has_its_own_limits_of_files(settings: Settings) -> None:
    with keyed_world(settings) as world:
        _limit(world, "root", max_files=1)  # the user has one already
        upload = {"files": {"file": ("a.jsonl", b'{"text": "a"}\n')}, "data": {"purpose": "fine-tune"}}
        assert _refusal(world.ask("root", "POST", "/v1/files", **upload)) == (403, "file_quota_exceeded", "file")
        assert world.ask("alice", "POST", "/v1/files", **upload).status_code == 200


# --- jobs that run at once ---


def _key(database: Database, user: str, role: Role = Role.USER, **limits: Any) -> str:
    with database.write() as session:
        return KeyRepository(session).create(name=user, user=user, role=role, limits=limits)[0].id


@pytest.fixture
def four_gpus(stage: Stage) -> Stage:
    stage._resources = type(stage._resources)(num_cores=4, num_gpus=4)
    stage.new_dispatcher()
    return stage


def _queue(stage: Stage, owner: str | None) -> str:
    job_id = stage.submit(owner=owner)
    stage.prepare_at_once(job_id, {"check_model": {"ok": True, "num_params": 1000}, **_DATA})
    return job_id


_DATA = {
    "prepare_data": {
        "ok": True,
        "num_examples": 10,
        "num_validation_examples": 2,
        "num_tokens": 100,
        "num_targets": 60,
        "warnings": [],
    }
}


def test_a_user_runs_so_many_jobs_at_once_and_the_others_say_why_they_wait(four_gpus: Stage) -> None:
    stage = four_gpus
    _key(stage.database, "ann", max_running_jobs=2)
    own = [_queue(stage, "ann") for _ in range(3)]
    other = _queue(stage, "bob")
    stage.tick()
    assert [stage.status(job_id) for job_id in (*own[:2], other)] == [JobStatus.RUNNING] * 3
    assert stage.status(own[2]) is JobStatus.QUEUED
    assert stage.job(own[2]).waiting_reason == "one of your running jobs must end first (your limit: 2)"
    late = _queue(stage, "cat")
    stage.tick()
    assert stage.status(late) is JobStatus.RUNNING, "one that may not begin yet holds up nobody"


def test_the_most_that_one_of_a_users_keys_allows_counts(four_gpus: Stage) -> None:
    stage = four_gpus
    _key(stage.database, "ann", max_running_jobs=1)
    second = _key(stage.database, "ann", max_running_jobs=2)
    own = [_queue(stage, "ann") for _ in range(3)]
    stage.tick()
    assert sum(stage.status(job_id) is JobStatus.RUNNING for job_id in own) == 2
    with stage.database.write() as session:
        KeyRepository(session).revoke(second)
        KeyRepository(session).create(name="x", user="ann", role=Role.ADMIN)
    stage.tick()
    assert sum(stage.status(job_id) is JobStatus.RUNNING for job_id in own) == 3, "an admin has no limit"


def test_key_without_limit_uses_the_setting(four_gpus: Stage) -> None:
    stage = four_gpus
    stage.settings = stage.settings.model_copy(update={"max_running_jobs_per_user": 1})
    stage.new_dispatcher()
    _key(stage.database, "ann")
    jobs = [*(_queue(stage, "ann") for _ in range(2)), *(_queue(stage, None) for _ in range(2))]
    stage.tick()
    assert [stage.status(job_id) is JobStatus.RUNNING for job_id in jobs] == [True, False, True, True]


# --- turns ---


def _end_running(stage: Stage, names: dict[str, str]) -> str:
    """Ends the only running job, and returns the name of the next one."""
    (running,) = [job_id for job_id in names if stage.status(job_id) is JobStatus.RUNNING]
    stage.request_cancel(running)
    journal = stage.journal(running, stage.job(running).attempt)
    journal.append_outcome("cancelled", "Cancelled")
    journal.close()
    stage.end_runner(running, stage.job(running).attempt)
    stage.tick(3)
    return next((names[job_id] for job_id in names if stage.status(job_id) is JobStatus.RUNNING), "")


def test_users_take_turns_on_one_device_however_many_jobs_each_has(stage: Stage) -> None:
    names = {_queue(stage, "ann"): f"a{number}" for number in range(3)}
    stage.tick()
    names |= {_queue(stage, "bob"): f"b{number}" for number in range(2)}
    names |= {_queue(stage, "cat"): "c0"}
    assert [_end_running(stage, names) for _ in range(6)] == ["b0", "c0", "a1", "b1", "a2", ""]


def test_a_job_that_its_owner_paused_and_resumed_keeps_no_place(stage: Stage) -> None:
    paused = _queue(stage, "ann")
    stage.tick()
    stage.request_pause(paused)
    journal = stage.journal(paused, 1)
    journal.append_outcome("paused", "Paused")
    journal.close()
    stage.end_runner(paused)
    stage.tick(2)
    assert stage.status(paused) is JobStatus.PAUSED
    other = _queue(stage, "bob")
    stage.request_resume(paused)
    stage.tick()
    assert stage.status(other) is JobStatus.RUNNING
    assert stage.status(paused) is JobStatus.QUEUED


# --- bytes stored ---


def _housekeeping(world: World, settings: Settings) -> Housekeeping:
    return Housekeeping(
        context_of(world.client).database, settings, node=node_of(settings.home), executor=AtOnce(), clock=lambda: 0.0
    )


def _write(path: Path, nbytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * nbytes)


def _upload(world: World, who: str, nbytes: int) -> Any:
    line = b'{"text": "' + b"a" * (nbytes - 13) + b'"}\n'
    files = {"file": ("a.jsonl", line)}
    return world.ask(who, "POST", "/v1/files", files=files, data={"purpose": "fine-tune"})


_MIB = 1024**2
_QUOTA = (403, "storage_quota_exceeded", None)


def test_what_a_users_jobs_leave_counts_as_stored(settings: Settings) -> None:
    """Models, checkpoints, prepared data and states, until they are deleted."""
    few = settings.model_copy(update={"max_stored_gib_per_user": 20 / 1024})
    with keyed_world(few) as world:
        mine = world.things["alice"]
        assert _submit(world, "alice").status_code == 200
        _write(few.fine_tuned_dir / mine.model / "model.safetensors", 12 * _MIB)
        make_model(few.fine_tuned_dir / f"{mine.model}-step-1")
        _write(few.fine_tuned_dir / f"{mine.model}-step-1" / "model.safetensors", 4 * _MIB)
        _write(few.jobs_dir / mine.done_id / "dataset" / "train.bin", 2 * _MIB)
        few.make_dirs()
        volume = Volume.open(few.ssd_dirs[0], direct=False)
        volume.reserve(JobId(mine.job_id), Demand(head_nbytes=UNIT_NBYTES, extent_nbytes=UNIT_NBYTES, num_extents=3))
        volume.close()
        assert _submit(world, "alice").status_code == 200, "it has not been measured yet"
        _housekeeping(world, few).tick()
        refused = _submit(world, "alice")
        assert _refusal(refused) == _QUOTA
        message = refused.json()["error"]["message"]
        for part in (
            "MiB stored (14 bytes of files, ",
            "your limit is 20.00 MiB",
            "`windlass storage`",
            "`windlass delete`",
        ):
            assert part in message
        assert _refusal(_upload(world, "alice", 100)) == (403, "storage_quota_exceeded", "file")
        assert _submit(world, "bob").status_code == 200
        assert _submit(world, "root").status_code == 200
        assert world.ask("alice", "DELETE", f"/v1/models/{mine.model}-step-1").status_code == 200
        assert _submit(world, "alice").status_code == 200, "it is freed at once"


def test_deleted_job_counts_no_more_and_the_model_that_it_leaves_does(settings: Settings) -> None:
    few = settings.model_copy(update={"max_stored_gib_per_user": 4 / 1024})
    with keyed_world(few) as world:
        mine = world.things["alice"]
        _write(few.jobs_dir / mine.done_id / "dataset" / "train.bin", 5 * _MIB)
        _housekeeping(world, few).tick()
        assert _refusal(_submit(world, "alice")) == _QUOTA
        assert world.ask("alice", "DELETE", f"{_JOBS}/{mine.done_id}").status_code == 200
        assert _submit(world, "alice").status_code == 200
        _write(few.fine_tuned_dir / mine.model / "model.safetensors", 5 * _MIB)
        _housekeeping(world, few).tick()
        assert _refusal(_submit(world, "alice")) == _QUOTA


def test_files_count_as_stored_and_one_that_fits_no_more_leaves_nothing(settings: Settings) -> None:
    few = settings.model_copy(update={"max_stored_gib_per_user": 1 / 1024})
    with keyed_world(few) as world:
        assert _upload(world, "alice", _MIB // 2).status_code == 200
        before = sorted(few.files_dir.iterdir())
        refused = _upload(world, "alice", _MIB // 2)
        assert _refusal(refused) == (403, "storage_quota_exceeded", "file")
        assert "this one has 0.50 MiB, and your limit is 1.00 MiB" in refused.text
        assert sorted(few.files_dir.iterdir()) == before
        assert _upload(world, "alice", 1000).status_code == 200


def test_a_key_has_its_own_limit_of_bytes_stored(settings: Settings) -> None:
    with keyed_world(settings) as world:
        _limit(world, "alice", max_stored_gib=1 / 1024)
        _limit(world, "root", max_stored_gib=0)
        for who in ("alice", "bob", "root"):
            _write(settings.fine_tuned_dir / world.things[who].model / "model.safetensors", 2 * _MIB)
        _housekeeping(world, settings).tick()
        assert _refusal(_submit(world, "alice")) == _QUOTA
        assert _submit(world, "bob").status_code == 200
        assert _submit(world, "root").status_code == 200, "admins have the limits of files only"


def test_nothing_is_measured_where_nobody_is_limited_and_no_request_looks_at_folders(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keyed_world(settings) as world, monkeypatch.context() as patch:
        patch.setattr(disk_usage.Tally, "nbytes", lambda *_: pytest.fail("a walk"))
        _housekeeping(world, settings).tick()
        _limit(world, "alice", max_stored_gib=1)
        assert _submit(world, "alice").status_code == 200
        assert _upload(world, "alice", 100).status_code == 200


def test_measuring_takes_a_small_share_of_the_time_and_is_tried_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s, measured_at = 0.0, []

    def measure(*_: object) -> None:
        nonlocal now_s
        measured_at.append(now_s)
        now_s += 10.0
        if len(measured_at) == 1:
            raise OSError("the disk is gone")

    monkeypatch.setattr("windlass.service.dispatcher.housekeeping.measure_stored", measure)
    with keyed_world(settings) as world:
        _limit(world, "alice", max_stored_gib=1)
        database = context_of(world.client).database
        housekeeping = Housekeeping(
            database, settings, node=node_of(settings.home), executor=AtOnce(), clock=lambda: now_s
        )
        while now_s < 1200:
            housekeeping.tick()
            now_s += 10.0
    assert measured_at == [0.0, 520.0, 1040.0]
    assert "could not be measured" in caplog.text
