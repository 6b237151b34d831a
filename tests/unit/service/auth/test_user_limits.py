"""The limits of a key that administrators set: priorities, numbers of jobs, files and webhook endpoints."""

from typing import Any

import pytest

from tests.support.service.api_client import context_of
from tests.support.service.dispatcher_stage import Stage
from tests.support.service.keyed import World, keyed_world
from windlass.service.installation.settings import Settings
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.api_keys import KeyRepository, Role

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
        assert "you have 2 jobs that wait or are paused; at most 2 are kept for you" in refused.text
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
    stage._machinery = type(stage._machinery)(num_cores=4, num_gpus=4)
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
    assert stage.job(own[2]).waiting_reason == "one of your jobs to end: 2 jobs of yours may run at once"
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
