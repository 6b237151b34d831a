"""A home is copied while it is in use, and restored elsewhere."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from tests.support.postgresql import PostgresServer
from tests.support.service.api_client import serve, upload
from tests.support.service.dispatcher_stage import Stage
from tests.unit.service.data.test_deletion import export, model_of, succeed, train
from windlass.engine.checkpoint import model_folder
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.hardware.yaml_files import load
from windlass.planner.question.plan_request import PlanRequest
from windlass.service.data import backup
from windlass.service.data.backup import BackupError, make_backup, restore_backup
from windlass.service.installation.home import node_of
from windlass.service.installation.restored import was_restored
from windlass.service.installation.settings import Settings, load_settings
from windlass.service.jobs.plan_files import load_plan_request
from windlass.service.jobs.spec_builder import training_config_of
from windlass.service.webhooks.secret_box import SecretBox
from windlass.storage.ids import Attempt, Formats, JobId, Precision, StatePrecision
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.errors import NewerDatabase
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.files import FileRepository
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.ssd.volume import Volume
from windlass.storage.store.format import StoreGeometry
from windlass.storage.store.tensor_store import TensorStore

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def settings(home: Path) -> Settings:
    home.mkdir(mode=0o700)
    return Settings(home=home, port=8642, max_file_mib=1)


@pytest.fixture
def stage(settings: Settings, client: TestClient) -> Iterator[Stage]:
    database = Database(settings.database_url)
    yield Stage(settings.home, database)
    database.close()


def copy_home(settings: Settings, tmp_path: Path) -> Settings:
    """The settings of a home that was restored from a backup of this one."""
    make_backup(settings, tmp_path / "backup")
    return load_settings(restore_backup(tmp_path / "backup", tmp_path / "new").home)


def seen(client: TestClient) -> dict[str, Any]:
    """All data that the API returns."""
    found = {path: client.get(path).json() for path in ("/v1/files", "/v1/models", "/v1/audit", JOBS)}
    found[JOBS].pop("windlass")
    for model in found["/v1/models"]["data"]:
        model.pop("windlass", None)
    for job in found[JOBS]["data"]:
        for part in ("events", "metrics", "checkpoints"):
            found[f"{job['id']}/{part}"] = client.get(f"{JOBS}/{job['id']}/{part}").json()
    for file in found["/v1/files"]["data"]:
        found[file["id"]] = client.get(f"/v1/files/{file['id']}/content").text
    return found


def test_a_home_with_jobs_of_all_kinds_is_read_again_elsewhere(
    stage: Stage, client: TestClient, settings: Settings, tmp_path: Path
) -> None:
    (settings.home / "windlass.toml").write_text("keep_jobs_days = 30\n")
    (settings.home / "cli.key").write_text("wk-secret\n")
    (settings.home / "cli.key").chmod(0o600)
    sealed = SecretBox(settings.home).close("whsec_x")
    upload(client)
    done, running = succeed(stage), train(stage)
    queued = client.post(JOBS, json={"model": model_of(stage, done), "training_file": upload(client)}).json()["id"]
    before = seen(client)
    node = node_of(settings.home)
    made = make_backup(settings, tmp_path / "backup", with_local_key=True)
    shutil.rmtree(settings.home)

    restored = restore_backup(tmp_path / "backup", tmp_path / "new")
    assert (restored.nbytes, made.remarks) == (made.nbytes, ())
    (remark,) = restored.remarks
    assert {running, queued} == {word.strip(",.") for word in remark.split() if word.startswith("ftjob-")}
    new = load_settings(tmp_path / "new")
    assert (new.keep_jobs_days, node_of(new.home)) == (30, node)
    assert SecretBox(new.home).open(sealed) == "whsec_x"
    assert was_restored(new.home)
    modes = {name: (new.home / name).stat().st_mode & 0o777 for name in (".", "secrets.key", "cli.key", "windlass.db")}
    assert modes == {".": 0o700, "secrets.key": 0o600, "cli.key": 0o600, "windlass.db": 0o600}
    with serve(new) as client_of_new:
        assert seen(client_of_new) == before
        assert (new.jobs_dir / done / "journal.jsonl").exists()


def test_an_unfinished_job_is_taken_up_by_the_dispatcher_of_the_new_home(
    stage: Stage, settings: Settings, tmp_path: Path
) -> None:
    job_id = train(stage)
    journal = stage.journal(job_id, 1)
    journal.append("metrics", "Step 3", step=3, total_steps=4, train_loss=0.1)  # not imported yet
    journal.close()
    new = copy_home(settings, tmp_path)
    database = Database(new.database_url)
    try:
        elsewhere = Stage(new.home, database)
        elsewhere.machine = "boot-2"
        elsewhere.new_dispatcher()
        elsewhere.let_leases_expire()
        assert elsewhere.job(job_id).step == 3
        assert "Attempt 1 was lost" in " ".join(elsewhere.messages(job_id))
        elsewhere.sit_out_the_pause()
        spec = elsewhere.runners.started[-1]
        assert (spec.job, spec.attempt) == (job_id, 2)
        paths = (spec.model_dir, spec.job_dir, spec.output_dir, spec.dataset_dir, spec.layout_file, *spec.ssd_dirs)
        assert all(Path(path).is_relative_to(new.home) for path in paths)
    finally:
        database.close()


def test_what_the_planner_was_asked_is_asked_again_of_the_new_home(
    stage: Stage, settings: Settings, tmp_path: Path
) -> None:
    job_id = stage.queue()
    folder = settings.jobs_dir / job_id / "prepare"
    training = training_config_of(stage.job(job_id))
    request = PlanRequest(
        model_dir=settings.models_dir / "tiny",
        hardware=load(Hardware, example_machines()["rtx4090-server"]),
        training=training,
        dataset_dir=settings.jobs_dir / job_id / "dataset",
        num_optimizers=1,
        host_memory_nbytes=None,
        device_memory_nbytes=None,
        is_alone=True,
    )
    (folder / "question.json").write_text(json.dumps(request.to_json()))
    new = copy_home(settings, tmp_path)
    # By then other jobs may train at the same time.
    moved = {"model_dir": new.models_dir / "tiny", "dataset_dir": new.jobs_dir / job_id / "dataset", "is_alone": False}
    moved["kept_times_dir"] = new.home / "measured-models"
    assert load_plan_request(new, stage.job(job_id)) == replace(request, **moved)


def test_backup_excludes_locks_and_partial_files(stage: Stage, settings: Settings, tmp_path: Path) -> None:
    stage.put_states("ftjob-1")
    job_id, _ = stage.run()
    for name in ("windlass.lock", "dispatcher.lock", "ray.json", "ray-token", "files/file-1.part"):
        (settings.home / name).write_text("x")
    for folder in ("logs", "kernels", "fine-tuned/.ft:tiny::a.0123.partial", "fine-tuned/.ft:tiny::b.deleted"):
        (settings.home / folder).mkdir(exist_ok=True)
        (settings.home / folder / "x").write_text("x")
    assert (settings.jobs_dir / job_id / "attempt-1.lock").exists()
    make_backup(settings, tmp_path / "backup")
    copied = {str(path.relative_to(tmp_path / "backup")) for path in (tmp_path / "backup").rglob("*") if path.is_file()}
    assert copied == {
        *("backup.json", "windlass.db", "home/node"),
        *("home/models/tiny/config.json", "home/models/tiny/model.safetensors"),
        *(f"home/jobs/{job_id}/{name}" for name in ("journal.jsonl", "prepare/prepare_data.json")),
    }


def test_the_key_of_the_command_line_is_copied_only_if_asked_for(
    stage: Stage, settings: Settings, tmp_path: Path
) -> None:
    (settings.home / "cli.key").write_text("wk-secret\n")
    (remark,) = make_backup(settings, tmp_path / "backup").remarks
    assert "API key of this machine's command line is not in it; copy it with --local-key" in remark
    texts = [path.read_bytes() for path in (tmp_path / "backup").rglob("*") if path.is_file()]
    assert not any(b"wk-secret" in text for text in texts)


def test_base_models_can_be_left_out_and_those_elsewhere_are_told_of(
    stage: Stage, settings: Settings, tmp_path: Path
) -> None:
    make_backup(settings, tmp_path / "without", with_base_models=False)
    assert not (tmp_path / "without" / "home" / "models").exists()
    moved = Settings(home=settings.home, models_dir=tmp_path / "models")
    (remark,) = make_backup(moved, tmp_path / "elsewhere").remarks
    assert f"they lie in {tmp_path / 'models'}, outside of the home" in remark


def test_backup_is_consistent_during_writes(
    stage: Stage, client: TestClient, settings: Settings, tmp_path: Path
) -> None:
    """The copy has all earlier data, and each job has as many events as its row says.

    Jobs, events and files are created and deleted meanwhile.
    """
    ending, num_written, made, made_before = threading.Event(), 0, list[str](), list[set[str]]()

    def write() -> None:
        nonlocal num_written
        while not ending.is_set():
            file_id = upload(client)
            job_id = client.post(JOBS, json={"model": "tiny", "training_file": file_id}).json()["id"]
            client.post(f"{JOBS}/{job_id}/cancel")
            client.delete(f"/v1/files/{file_id}")
            if num_written % 2:
                client.delete(f"{JOBS}/{job_id}")
            else:
                made.append(job_id)
            num_written += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for index in range(5):
            while len(made) <= index and writer.is_alive():
                time.sleep(0.01)
            made_before.append(set(made))
            make_backup(settings, tmp_path / f"backup-{index}")
    finally:
        ending.set()
        writer.join()
    assert len(made_before[-1]) >= 5
    for index in range(5):
        new = load_settings(restore_backup(tmp_path / f"backup-{index}", tmp_path / f"new-{index}").home)
        with serve(new) as restored:
            jobs = restored.get(JOBS, params={"limit": 1000}).json()["data"]
            assert {job["id"] for job in jobs} >= made_before[index]
            for job in jobs:
                messages = restored.get(f"{JOBS}/{job['id']}/events").json()["data"]
                assert len(messages) == (2 if job["status"] == "cancelled" else 1)
            for file in restored.get("/v1/files").json()["data"]:
                assert restored.get(f"/v1/files/{file['id']}/content").status_code == 200
        database = Database(new.database_url)
        with database.read() as session:
            assert session.execute(text("PRAGMA integrity_check")).scalar_one() == "ok"
            assert session.execute(text("PRAGMA foreign_key_check")).all() == []
        database.close()


def test_objects_deleted_during_backup_are_left_out(
    stage: Stage, client: TestClient, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database was copied first. A model that is deleted during the copy leaves no partial one."""
    job_id = succeed(stage)
    kept, gone = upload(client), upload(client)
    doomed = f"{model_of(stage, job_id)}-step-2"
    copy_file, copied = model_folder.copy_file, []

    def copy_and_delete(source: Path, target: Path) -> None:
        copy_file(source, target)
        copied.append(source.name)
        if source.parent.name == doomed and len([name for name in copied if name == source.name]) == 2:
            client.delete(f"/v1/models/{doomed}")
        client.delete(f"/v1/files/{gone}")

    monkeypatch.setattr(backup, "copy_file", copy_and_delete)
    new = copy_home(settings, tmp_path)
    monkeypatch.undo()
    assert "model.safetensors" in copied
    with serve(new) as restored:
        files = [file["id"] for file in restored.get("/v1/files").json()["data"]]
        assert set(files) == {kept, *stage.job(job_id).result_files}
        models = {model["id"] for model in restored.get("/v1/models").json()["data"]}
        assert models == {"tiny", model_of(stage, job_id)}
        assert restored.get(f"{JOBS}/{job_id}/checkpoints").json()["data"] == []
    assert not (new.fine_tuned_dir / doomed).exists()


# --- attempts that were begun since ---


def test_an_attempt_that_was_begun_while_the_home_was_copied_counts(
    stage: Stage, settings: Settings, tmp_path: Path
) -> None:
    """Its records are in the journal, which was copied after the database."""
    job_id = train(stage)
    make_backup(settings, tmp_path / "backup")
    journal = tmp_path / "backup" / "home" / "jobs" / job_id / "journal.jsonl"
    with journal.open("a") as file:
        record = {"attempt": 3, "seq": 1, "created_at": 1.0, "kind": "message", "level": "info", "message": "x"}
        file.write(json.dumps(record | {"data": {}}) + "\n")
    new = load_settings(restore_backup(tmp_path / "backup", tmp_path / "new").home)
    database = Database(new.database_url)
    with database.read() as session:
        assert JobRepository(session).get(job_id).attempt == 3
    database.close()


def test_an_attempt_that_wrote_to_the_ssds_since_counts(stage: Stage, settings: Settings, tmp_path: Path) -> None:
    """The backup is older than the states on surviving SSDs: there only a newer attempt may resume."""
    job_id = train(stage)
    ssds = [tmp_path / "ssd-a", tmp_path / "ssd-b"]
    listed = ", ".join(f'"{ssd}"' for ssd in ssds)
    (settings.home / "windlass.toml").write_text(f"ssd_dirs = [{listed}]\n")
    make_backup(load_settings(settings.home), tmp_path / "backup")
    for index, ssd in enumerate(ssds):
        ssd.mkdir()
        write_as(ssd, index, JobId(job_id), Attempt(4 + index))
    new = load_settings(restore_backup(tmp_path / "backup", tmp_path / "new").home)
    database = Database(new.database_url)
    with database.read() as session:
        assert JobRepository(session).get(job_id).attempt == 5
    database.close()


def write_as(ssd: Path, index: int, job: JobId, attempt: Attempt) -> None:
    geometry = StoreGeometry(
        job=job,
        attempt=Attempt(1),
        ssd=index,
        ssd_weights=(1, 1),
        rank=0,
        formats=Formats(Precision.BF16, StatePrecision.FP32),
        chunk_numel=2048,
        chunks_per_block=(1,),
    )
    volume = Volume.open(ssd, direct=False)
    TensorStore.create(volume, geometry)
    TensorStore.open(volume, job, attempt)
    volume.close()


# --- what is refused ---


def test_nothing_is_written_over(stage: Stage, settings: Settings, tmp_path: Path) -> None:
    make_backup(settings, tmp_path / "backup")
    with pytest.raises(BackupError, match="exists already"):
        make_backup(settings, tmp_path / "backup")
    with pytest.raises(BackupError, match="lies in the home itself"):
        make_backup(settings, settings.home / "backup")
    with pytest.raises(BackupError, match="is not empty"):
        restore_backup(tmp_path / "backup", settings.home)
    assert restore_backup(tmp_path / "backup", tmp_path / "new").home == tmp_path / "new"


def test_restore_of_invalid_backup_creates_no_home(stage: Stage, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BackupError, match="is no backup"):
        restore_backup(tmp_path / "empty", tmp_path / "new")
    make_backup(settings, tmp_path / "backup")
    manifest = tmp_path / "backup" / "backup.json"
    about = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(about | {"format": 2}))
    with pytest.raises(BackupError, match="has format 2"):
        restore_backup(tmp_path / "backup", tmp_path / "new")
    manifest.write_text(json.dumps(about))
    database = Database(f"sqlite:///{tmp_path}/backup/windlass.db")
    with database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    with pytest.raises(NewerDatabase):
        restore_backup(tmp_path / "backup", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_backup_that_fails_leaves_nothing(
    stage: Stage, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backup, "copy_file", refuse)
    with pytest.raises(BackupError, match=r"could not be made: .*No space left"):
        make_backup(settings, tmp_path / "backup")
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


def test_a_home_without_a_database_is_no_home(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="there is no home"):
        make_backup(Settings(home=tmp_path / "none"), tmp_path / "backup")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BackupError, match="there is no database"):
        make_backup(Settings(home=tmp_path / "empty"), tmp_path / "backup")


# --- older versions, other databases ---


def test_a_backup_of_an_older_version_is_migrated(tmp_path: Path, home: Path) -> None:
    home.mkdir(mode=0o700)
    old = Settings(home=home)
    migrate(old.database_url, revision="0004")
    new = copy_home(old, tmp_path)
    with serve(new) as client:
        assert client.get(JOBS).json()["data"] == []


def test_postgresql_is_left_to_its_own_tools(
    tmp_path: Path, home: Path, postgresql: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(mode=0o700)
    with postgresql.new_database(migrated=True) as url:
        monkeypatch.setenv("WINDLASS_DATABASE_URL", url)
        settings = load_settings(home)
        database = Database(url)
        stage = Stage(home, database)
        job_id = train(stage)
        export(stage, job_id)
        with database.write() as session:  # another home has its content
            FileRepository(session).add(file_id="file-elsewhere", filename="a", purpose="fine-tune", nbytes=1)
        made = make_backup(settings, tmp_path / "backup")
        assert "take it with pg_dump just before" in made.remarks[0]
        assert not (tmp_path / "backup" / "windlass.db").exists()
        shutil.rmtree(home)
        restored = restore_backup(tmp_path / "backup", home)
        assert f"not finished: job {job_id}" in restored.remarks[0]
        with database.read() as session:
            assert JobRepository(session).get(job_id).status is JobStatus.RUNNING
            assert FileRepository(session).all_ids() == {"file-elsewhere"}
        database.close()
    shutil.rmtree(home)
    with pytest.raises(BackupError, match="the database does not answer; restore it first"):
        restore_backup(tmp_path / "backup", home)
    assert not home.exists()
