"""The routes for files: a box gets what its own jobs need, and sends their results in parts."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.service.cluster_stage import Cluster, add_box
from windlass.service.cluster.box.connection import HeadRefused, HeadUnreachable
from windlass.service.cluster.box.send import Sender
from windlass.service.machine.fleet.content import ContentFile, JobContent, Where, model_name
from windlass.storage.cancellation import CancelToken
from windlass.storage.sql.models import Job


@pytest.fixture
def job_id(cluster: Cluster) -> str:
    """A job that is being given to the box."""
    job_id = cluster.prepare()
    cluster.give(job_id)
    return job_id


def facts(content: bytes, **more: Any) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "nbytes": len(content), **more}


def result_url(cluster: Cluster, job_id: str, file: str = "model.safetensors") -> str:
    return f"/v1/node/jobs/{job_id}/results/fine_tuned/{model_name(cluster.head.job(job_id))}/{file}"


def code(answer: httpx.Response) -> object:
    return answer.json()["error"]["code"]


def test_job_answers_with_its_row_and_the_files_that_it_needs(cluster: Cluster, job_id: str) -> None:
    partial = cluster.head.settings.models_dir / "tiny" / "pytorch_model.bin"
    partial.write_bytes(b"pickled")
    content = cluster.link.job(job_id)
    assert isinstance(content, JobContent)
    assert content.row["id"] == job_id
    assert {(file.where.value, file.path) for file in content.files} == {
        ("job", "layout.json"),
        ("job", "prepare/prepare_data.json"),
        ("job", "dataset/tokens.bin"),
        ("model", "tiny/config.json"),
        ("model", "tiny/model.safetensors"),
    }


def test_job_whose_files_are_still_read_answers_so(cluster: Cluster, job_id: str) -> None:
    cluster.manifests._wait_s = 0.0
    answer = cluster.client.get(f"/v1/node/jobs/{job_id}")
    assert answer.status_code in (200, 202)
    if answer.status_code == 202:
        assert answer.json()["total_nbytes"] > 1_000_000


def test_content_is_sent_from_an_offset_on(cluster: Cluster, job_id: str) -> None:
    whole = (cluster.head.settings.jobs_dir / job_id / "dataset" / "tokens.bin").read_bytes()
    digest = hashlib.sha256(whole).hexdigest()
    assert b"".join(cluster.link.content(digest, 0)) == whole
    assert b"".join(cluster.link.content(digest, 1_000_000)) == whole[1_000_000:]
    assert b"".join(cluster.link.content(digest, len(whole))) == b""
    answer = cluster.client.get(f"/v1/node/content/{digest}", headers={"Range": "bytes=5-9"})
    assert (answer.status_code, code(answer)) == (400, "invalid_value")


def test_content_of_no_job_of_the_box_is_refused(cluster: Cluster, job_id: str) -> None:
    other = cluster.prepare()
    secret = cluster.head.settings.jobs_dir / other / "dataset" / "tokens.bin"
    secret.write_bytes(b"the data of another user")
    for digest in (facts(secret.read_bytes())["sha256"], "0" * 64, "..", "x"):
        answer = cluster.client.get(f"/v1/node/content/{digest}")
        assert answer.status_code == 404
    add_box(cluster.head.database, "cellar", "node-cellar", head=cluster.head.node)
    own = facts(b"weights")["sha256"]
    assert cluster.client.get(f"/v1/node/content/{own}").status_code == 200
    assert cluster.client.get(f"/v1/node/content/{own}", headers={"X-Box": "cellar"}).status_code == 404
    answer = cluster.client.get(f"/v1/node/jobs/{job_id}", headers={"X-Box": "cellar"})
    assert (answer.status_code, code(answer)) == (404, "job_elsewhere")


def test_content_that_has_changed_is_not_sent(cluster: Cluster, job_id: str) -> None:
    digest = facts(b"weights")["sha256"]
    assert cluster.client.get(f"/v1/node/content/{digest}").status_code == 200
    (cluster.head.settings.models_dir / "tiny" / "model.safetensors").write_bytes(b"changed")
    assert cluster.client.get(f"/v1/node/content/{digest}").status_code == 404


def test_content_is_sent_although_the_files_of_another_job_cannot_be_read(cluster: Cluster, job_id: str) -> None:
    broken = cluster.prepare()
    cluster.give(broken)
    of = cluster.manifests.of

    def fail_for_one(job: Job) -> Any:
        if job.id == broken:
            raise PermissionError(13, "Permission denied")
        return of(job)

    cluster.manifests.of = fail_for_one  # type: ignore[method-assign]
    with cluster.head.database.write() as session:
        session.get_one(Job, broken).priority = -1  # it is looked at first
    digest = facts(b"weights")["sha256"]
    assert cluster.client.get(f"/v1/node/content/{digest}").status_code == 200


def test_upload_comes_in_parts_and_tells_where_it_goes_on(cluster: Cluster, job_id: str) -> None:
    content, url = bytes(range(200)), result_url(cluster, job_id)
    put = cluster.client.put
    assert put(url, params=facts(content, offset=0), content=content[:80]).json() == {
        "offset": 80,
        "is_complete": False,
    }
    assert cluster.client.head(url, params=facts(content)).headers["Upload-Offset"] == "80"
    answer = put(url, params=facts(content, offset=10), content=content[10:])
    assert (answer.status_code, code(answer)) == (409, "wrong_offset")
    assert put(url, params=facts(content, offset=80), content=content[80:]).json()["is_complete"]
    assert put(url, params=facts(content, offset=0), content=content).json()["is_complete"]  # a lost answer


def test_upload_that_is_cut_off_within_a_part_keeps_what_has_arrived(cluster: Cluster, job_id: str) -> None:
    content, url = bytes(range(256)) * 8192, result_url(cluster, job_id)

    def cut() -> Iterator[bytes]:
        yield content[: 1024**2]
        raise ConnectionError("the network was cut")

    with pytest.raises(ConnectionError):
        cluster.client.put(url, params=facts(content, offset=0), content=cut())
    arrived, deadline_s = 0, time.monotonic() + 10
    answer = None
    while answer is None or answer.status_code == 409:  # the head has not noticed the cut yet
        assert time.monotonic() < deadline_s
        arrived = int(cluster.client.head(url, params=facts(content)).headers["Upload-Offset"])
        answer = cluster.client.put(url, params=facts(content, offset=arrived), content=content[arrived:])
    assert 0 < arrived <= 1024**2
    assert answer.json()["is_complete"]


def test_upload_of_a_wrong_content_is_refused_and_begins_anew(cluster: Cluster, job_id: str) -> None:
    content, url = b"right", result_url(cluster, job_id)
    answer = cluster.client.put(url, params=facts(content, offset=0), content=b"wrong")
    assert (answer.status_code, code(answer)) == (422, "wrong_digest")
    answer = cluster.client.put(url, params=facts(content, offset=0), content=b"too long a content")
    assert (answer.status_code, code(answer)) == (400, "too_long")
    assert cluster.client.head(url, params=facts(content)).headers["Upload-Offset"] == "0"


@pytest.mark.parametrize(
    "place",
    [
        "job/../../other/plans/1.json",
        "job/journal.jsonl",
        "job/plans/..%2F1.json",
        "model/tiny/config.json",
        "fine_tuned/ft:tiny::000000000000/config.json",
        "fine_tuned/{model}/..%2F..%2Fconfig.json",
        "fine_tuned/{model}-step-x/config.json",
        "file/file-of-another-job",
        "etc/passwd",
    ],
)
def test_upload_to_any_other_place_is_refused(cluster: Cluster, job_id: str, place: str) -> None:
    place = place.format(model=model_name(cluster.head.job(job_id)))
    before = sorted(cluster.head.settings.home.rglob("*"))
    answer = cluster.client.put(f"/v1/node/jobs/{job_id}/results/{place}", params=facts(b"x", offset=0), content=b"x")
    assert answer.status_code in (400, 404, 405)
    assert sorted(cluster.head.settings.home.rglob("*")) == before


def test_upload_for_a_job_of_another_box_is_refused(cluster: Cluster, job_id: str) -> None:
    other = cluster.prepare()
    answer = cluster.client.put(result_url(cluster, other), params=facts(b"x", offset=0), content=b"x")
    assert (answer.status_code, code(answer)) == (404, "job_elsewhere")


def test_model_appears_when_all_its_files_have_arrived(cluster: Cluster, job_id: str) -> None:
    model = model_name(cluster.head.job(job_id))
    target = cluster.head.settings.fine_tuned_dir / model
    files = {"config.json": b"{}", "model.safetensors": b"weights of a model"}
    manifest = {
        "where": "fine_tuned",
        "folder": model,
        "files": [{"path": f"{model}/{name}", "where": "fine_tuned", **facts(body)} for name, body in files.items()],
    }
    complete = f"/v1/node/jobs/{job_id}/results/complete"
    for name, body in files.items():
        answer = cluster.client.post(complete, json=manifest)
        assert (answer.status_code, code(answer)) == (409, "missing_content")
        assert not target.exists()
        cluster.client.put(result_url(cluster, job_id, name), params=facts(body, offset=0), content=body)
    for _ in range(2):  # the second time after a lost answer
        assert cluster.client.post(complete, json=manifest).status_code == 204
        assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    escape = {**manifest, "folder": ".."}
    assert cluster.client.post(complete, json=escape).status_code == 422 or code(
        cluster.client.post(complete, json=escape)
    )
    assert [path.name for path in cluster.head.settings.fine_tuned_dir.iterdir()] == [model]


def test_sender_goes_on_after_a_cut_and_sends_shared_contents_once(cluster: Cluster, job_id: str) -> None:
    model = model_name(cluster.head.job(job_id))
    sender = Sender(settings=cluster.box.settings, link=cluster.link)
    for name in (f"{model}-step-2", model):
        folder = cluster.box.settings.fine_tuned_dir / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    put, sent = cluster.link.put, list[str]()

    def cut(job: str, file: ContentFile, offset: int, body: Any) -> int:
        if not sent:
            sent.append("cut")
            put(job, file, offset, [next(iter(body))[:1]])
            raise HeadUnreachable("cut")
        sent.append(Path(file.path).name)
        return put(job, file, offset, body)

    cluster.link.put = cut  # type: ignore[method-assign]
    with pytest.raises(HeadUnreachable):
        sender.send_model(job_id, f"{model}-step-2", cancel=CancelToken())
    sender.send_model(job_id, f"{model}-step-2", cancel=CancelToken())
    sender.send_model(job_id, model, cancel=CancelToken())
    assert sent == ["cut", "config.json", "model.safetensors"]  # the model's files have arrived with the checkpoint
    assert sender.has_sent(job_id, model)
    assert (cluster.head.settings.fine_tuned_dir / model / "model.safetensors").read_bytes() == b"weights" * 1000


def test_sender_is_refused_for_a_job_that_is_not_the_boxs_any_more(cluster: Cluster, job_id: str) -> None:
    with cluster.head.database.write() as session:
        session.get_one(type(cluster.head.job(job_id)), job_id).node = cluster.head.node
    (cluster.box.settings.files_dir / "file-x").write_text("x")
    with pytest.raises(HeadRefused):
        Sender(settings=cluster.box.settings, link=cluster.link).send_file(job_id, "file-x", cancel=CancelToken())


def test_content_file_refuses_paths_that_leave_their_folder() -> None:
    for path in ("../x", "/x", "a/../../x", "", ".", "a//b", "a/./b", "a\0b"):
        with pytest.raises(ValueError, match="path"):
            ContentFile(path=path, where=Where.JOB, nbytes=0, sha256="0" * 64)
