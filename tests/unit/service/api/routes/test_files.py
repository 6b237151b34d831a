"""Files over HTTP."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.power_cut import PowerCut
from tests.support.service.api_client import serve, upload
from tests.support.service.dispatcher_stage import Stage
from windlass.engine.data.data_check import check_data
from windlass.engine.data.examples import DataFile
from windlass.service.api import uploads as uploaded_data
from windlass.service.installation.settings import Settings
from windlass.storage.sql.database import Database


def test_file_content_equals_upload(client: TestClient, settings: Settings) -> None:
    content = b'{"text": "gr\xc3\xbc\xc3\x9f"}\r\n \r\n'
    file_id = upload(client, content, "da ta.jsonl")
    file = client.get(f"/v1/files/{file_id}").json()
    assert (file["bytes"], file["filename"], file["purpose"]) == (len(content), "da ta.jsonl", "fine-tune")
    response = client.get(f"/v1/files/{file_id}/content")
    assert response.content == content
    assert response.headers["content-type"] == "application/octet-stream"
    stored = settings.files_dir / file_id
    assert stored.stat().st_mode & 0o777 == 0o600


def test_upload_power_loss_after_the_answer_leaves_the_bytes(
    client: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = PowerCut(settings.files_dir, monkeypatch)
    file_id = upload(client, b'{"text": "a"}')
    assert cut.left() == {file_id: b'{"text": "a"}'}


@pytest.mark.parametrize(
    ("name", "content", "purpose", "param", "message"),
    [
        ("a.txt", b"x", "fine-tune", "file", "must end in .jsonl, got 'a.txt'"),
        ("a.json", b'{"text": "A"}\n', "fine-tune", "file", "if it has one JSON object a line, name it a.jsonl"),
        ("a.jsonl", b"", "fine-tune", "file", "'a.jsonl' is empty"),
        ("a.csv", b"prompt,completion\nA,B\n", "fine-tune", "file", '{"prompt": "A", "completion": "B"}'),
        ("a.json", b'[{"text": "A"}]', "fine-tune", "file", "this is one JSON array"),
        ("a.parquet", b"PAR1\x15", "fine-tune", "file", "this is a Parquet file"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": 3}',
            "fine-tune",
            "file",
            "a.jsonl, line 2, field text: expected a string",
        ),
        ("a.jsonl", b'{"text": "a"}\n' * 30_000 + b"{", "fine-tune", "file", "a.jsonl, line 30001: not valid JSON"),
        ("a.jsonl", b"x", "assistants", "purpose", "must be \"fine-tune\", got 'assistants'"),
    ],
)
def test_invalid_training_file_is_refused(
    client: TestClient, settings: Settings, name: str, content: bytes, purpose: str, param: str, message: str
) -> None:
    response = client.post("/v1/files", files={"file": (name, content)}, data={"purpose": purpose})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert list(settings.files_dir.iterdir()) == []


def test_large_file_is_checked_up_to_a_time_limit(
    client: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that are not read in time, or by a process that dies, are left to the preparation."""
    content = b'{"text": "a"}\n' * 30_000 + b"{"
    assert check_data(DataFile(path=_file(settings, content), param="file"), limit_s=0.0) is False
    monkeypatch.setattr(uploaded_data, "_MEMORY_NBYTES", 1 << 20)
    assert upload(client, content).startswith("file-")


def _file(settings: Settings, content: bytes) -> Path:
    path = settings.home / "a.jsonl"
    path.write_bytes(content)
    return path


def test_a_name_with_a_path_is_only_a_name(client: TestClient, settings: Settings) -> None:
    file_id = upload(client, name="../../x\\..\\evil.jsonl")
    assert client.get(f"/v1/files/{file_id}").json()["filename"] == "evil.jsonl"
    assert [path.name for path in settings.files_dir.iterdir()] == [file_id]


def test_lists_in_pages(client: TestClient) -> None:
    ids = [upload(client, name=f"{index}.jsonl") for index in range(5)]

    def page(**params: Any) -> list[str]:
        return [file["id"] for file in client.get("/v1/files", params=params).json()["data"]]

    assert page() == ids[::-1]
    assert page(order="asc", limit=2) == ids[:2]
    assert page(order="asc", limit=9, after=ids[1]) == ids[2:]
    assert page(purpose="fine-tune-results") == []
    assert client.get("/v1/files", params={"limit": 5}).json()["has_more"] is False
    assert client.get("/v1/files", params={"limit": 4}).json()["has_more"] is True
    assert client.get("/v1/files", params={"after": "file-none"}).status_code == 404


def test_delete(client: TestClient, settings: Settings, file_id: str) -> None:
    assert client.delete(f"/v1/files/{file_id}").json() == {"id": file_id, "object": "file", "deleted": True}
    assert client.get(f"/v1/files/{file_id}/content").status_code == 404
    assert client.delete(f"/v1/files/{file_id}").status_code == 404
    assert list(settings.files_dir.iterdir()) == []


def test_a_file_that_a_job_needs_stays(client: TestClient, file_id: str) -> None:
    job = client.post("/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file_id}).json()
    refused = client.delete(f"/v1/files/{file_id}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "file_in_use")
    assert client.get(f"/v1/files/{file_id}/content").status_code == 200
    client.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel")
    assert client.delete(f"/v1/files/{file_id}").status_code == 200


def test_partial_uploads_of_killed_service_are_removed(settings: Settings) -> None:
    settings.make_dirs()
    (settings.files_dir / "file-1.part").write_bytes(b"half")
    (settings.files_dir / "file-2").write_bytes(b"whole")
    with serve(settings):
        assert [path.name for path in settings.files_dir.iterdir()] == ["file-2"]


def test_a_file_that_is_deleted_through_another_home_goes_where_its_bytes_are(
    tmp_path: Path, database_url: str, database: Database
) -> None:
    here, elsewhere = (Stage(tmp_path / name, database, port=8642, database_url=database_url) for name in "ab")
    with serve(here.settings) as client:
        kept, gone = upload(client), upload(client)
    with serve(elsewhere.settings) as client:
        refused = client.get(f"/v1/files/{kept}/content")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "file_elsewhere")
        assert client.delete(f"/v1/files/{gone}").status_code == 200
        assert client.get(f"/v1/files/{gone}").status_code == 404
    for stage in (elsewhere, here):
        assert (here.settings.files_dir / gone).exists()
        stage.now += 1
        stage.tick()
    assert [path.name for path in here.settings.files_dir.iterdir()] == [kept]
