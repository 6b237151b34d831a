"""The box's calls of its head: no name in an answer leads out of the folders of its job."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from windlass.service.cluster.box.connection import HeadConnection, HeadUnreachable
from windlass.service.cluster.box.head_link import HeadLink
from windlass.service.machine.fleet.messages import SyncRequest

JOB = "ftjob-" + "a" * 24
ROW: dict[str, Any] = {
    "id": JOB,
    "status": "queued",
    "attempt": 0,
    "created_at": 1.0,
    "owner": None,
    "model": "tiny",
    "training_file": "file-1",
    "validation_file": None,
    "suffix": None,
    "seed": 1,
    "method": {},
    "windlass": {},
    "job_metadata": {},
    "priority": 0,
    "idempotency_key": None,
    "request_digest": None,
    "hyperparameters": {},
    "result_files": [],
}
ANSWER: dict[str, Any] = {"state": "ready", "lease_s": 60.0, "windlass": "1"}


@pytest.fixture
def answers() -> dict[str, Any]:
    """The head's next answer."""
    return {}


@pytest.fixture
def link(answers: dict[str, Any]) -> Iterator[HeadLink]:
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, json=answers))
    with httpx.Client(base_url="https://head", transport=transport) as client:
        yield HeadLink(HeadConnection(client))


def test_job_of_the_right_form_is_read(link: HeadLink, answers: dict[str, Any]) -> None:
    answers.update(row=ROW, files=[])
    assert link.job(JOB).row == ROW  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "lie",
    [
        {"id": "../../victim"},
        {"id": "ftjob-" + "b" * 24},
        {"model": "../../victim"},
        {"suffix": "../../victim"},
        {"training_file": "../victim"},
        {"result_files": ["../../victim"]},
        {"result_files": ["/victim"]},
        {"attempt": "x"},
    ],
    ids=repr,
)
def test_job_whose_row_names_other_places_is_refused(
    link: HeadLink, answers: dict[str, Any], lie: dict[str, Any]
) -> None:
    answers.update(row=ROW | lie, files=[])
    with pytest.raises(HeadUnreachable, match="the head answered"):
        link.job(JOB)


@pytest.mark.parametrize(
    "lie",
    [
        {"instructions": [{"ordinal": 1, "job_id": "../../victim", "kind": "take"}]},
        {"instructions": [{"ordinal": 1, "job_id": JOB + "\n", "kind": "take"}]},
        {"cursors": {"../../victim": 0}},
        {"missing": {"../../victim": []}},
    ],
    ids=repr,
)
def test_answer_with_a_job_of_another_form_is_refused(
    link: HeadLink, answers: dict[str, Any], lie: dict[str, Any]
) -> None:
    answers.update(ANSWER | {"instructions": [{"ordinal": 1, "job_id": JOB, "kind": "take"}], "cursors": {JOB: 0}})
    assert link.sync(SyncRequest()).cursors == {JOB: 0}
    answers.update(lie)
    with pytest.raises(HeadUnreachable, match="the head answered"):
        link.sync(SyncRequest())
