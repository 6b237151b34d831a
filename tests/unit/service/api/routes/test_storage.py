"""The storage of jobs, models and files: real disk usage, each counted once, visible to its owner only."""

import os
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, make_model
from tests.support.service.keyed import USERS, keyed_world
from windlass.amounts import bytes_text
from windlass.service.cli import jobs as cli_jobs
from windlass.service.data.disk_usage import Tally
from windlass.service.installation.settings import Settings
from windlass.storage.ids import JobId
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.ssd.volume import Volume
from windlass.storage.ssd.volume_format import UNIT_NBYTES, Demand

JOBS = "/v1/fine_tuning/jobs"
MIB = 1024**2


def write(path: Path, nbytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(nbytes))


def put_states(ssd_dir: Path, job: str, num_extents: int) -> None:
    volume = Volume.open(ssd_dir, direct=False)
    volume.reserve(JobId(job), Demand(head_nbytes=UNIT_NBYTES, extent_nbytes=UNIT_NBYTES, num_extents=num_extents))
    volume.close()


def test_blocks_count_and_not_lengths(tmp_path: Path) -> None:
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1024 * MIB)
    write(tmp_path / "full", MIB)
    assert Tally().nbytes(tmp_path / "holes") == 0
    assert MIB <= Tally().nbytes(tmp_path / "full") < MIB + 64 * 1024
    assert MIB <= Tally().nbytes(tmp_path) < MIB + 64 * 1024
    assert Tally().nbytes(tmp_path / "none") == 0


def test_a_file_with_two_names_counts_once_and_links_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "a" / "weights", MIB)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "weights").hardlink_to(tmp_path / "a" / "weights")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    tally = Tally()
    assert tally.nbytes(tmp_path / "a") >= MIB
    assert tally.nbytes(tmp_path / "b") < MIB
    assert tally.nbytes(tmp_path / "c") < MIB
    assert Tally().nbytes(tmp_path) < 2 * MIB


def test_what_a_job_occupies_is_told_by_part(client: TestClient, settings: Settings, file_id: str) -> None:
    settings.make_dirs()
    job_id = client.post(JOBS, json={"model": "tiny", "training_file": file_id}).json()["id"]
    nothing = client.get(f"{JOBS}/{job_id}/storage").json()
    assert (nothing["bytes"], set(nothing["parts"].values())) == (0, {0})
    folder, model = settings.jobs_dir / job_id, f"ft:tiny::{job_id.removeprefix('ftjob-')[:12]}"
    write(folder / "dataset" / "train.bin", 3 * MIB)
    write(folder / "journal.jsonl", 2 * MIB)
    write(folder / "timeline" / "1.json", MIB)
    write(folder / "prepare" / "log", MIB)
    make_model(settings.fine_tuned_dir / model)
    write(settings.fine_tuned_dir / model / "model.safetensors", 5 * MIB)
    write(settings.fine_tuned_dir / f"{model}-step-1" / "model.safetensors", 4 * MIB)
    # The best checkpoint became the job's model.
    (settings.fine_tuned_dir / f"{model}-step-2").mkdir()
    best = settings.fine_tuned_dir / f"{model}-step-2" / "model.safetensors"
    best.hardlink_to(settings.fine_tuned_dir / model / "model.safetensors")
    write(settings.files_dir / "file-csv", MIB)
    with context_of(client).database.write() as session:
        JobRepository(session).get(job_id).result_files = ["file-csv"]
    put_states(settings.ssd_dirs[0], job_id, 2)
    put_states(settings.ssd_dirs[1], job_id, 1)
    put_states(settings.ssd_dirs[1], "ftjob-other", 7)
    found = client.get(f"{JOBS}/{job_id}/storage").json()
    in_mib = {name: nbytes // MIB for name, nbytes in found["parts"].items()}
    assert in_mib == {
        "dataset": 3,
        "journal": 2,
        "timeline": 1,
        "other": 1,
        "states": 5,
        "model": 5,
        "checkpoints": 4,
        "result_files": 1,
    }
    assert found["bytes"] == sum(found["parts"].values())
    assert cli_jobs._occupied(found).startswith("22.03 MiB: ")
    assert client.get(f"/v1/models/{model}").json()["windlass"]["bytes"] == found["parts"]["model"]


def test_all_that_occupies_disks_is_listed_with_totals(client: TestClient, settings: Settings, file_id: str) -> None:
    settings.make_dirs()
    job_id = client.post(JOBS, json={"model": "tiny", "training_file": file_id}).json()["id"]
    model = f"ft:tiny::{job_id.removeprefix('ftjob-')[:12]}"
    write(settings.jobs_dir / job_id / "dataset" / "train.bin", 3 * MIB)
    write(settings.models_dir / "org" / "big" / "config.json", 6 * MIB)
    write(settings.fine_tuned_dir / model / "model.safetensors", 5 * MIB)
    write(settings.fine_tuned_dir / f"{model}-step-1" / "model.safetensors", 4 * MIB)
    put_states(settings.ssd_dirs[0], job_id, 6)
    answer = client.get("/v1/storage").json()
    largest = [(row["kind"], row["id"], row["bytes"] // MIB) for row in answer["data"][:5]]
    assert largest == [
        ("states", job_id, 7),
        ("base_model", "org/big", 6),
        ("model", model, 5),
        ("checkpoint", f"{model}-step-1", 4),
        ("job", job_id, 3),
    ]
    rest = {(row["kind"], row["id"]) for row in answer["data"][5:]}
    assert rest == {("base_model", "tiny"), ("file", file_id)} | {
        ("service", name) for name in ("database", "logs", "kernels")
    }
    totals = answer["windlass"]
    assert totals["bytes"] == sum(row["bytes"] for row in answer["data"]) == sum(totals["bytes_by_kind"].values())
    assert totals["free_bytes"] > 0


def test_users_are_told_of_what_is_theirs(settings: Settings) -> None:
    with keyed_world(settings) as world:
        for things in world.things.values():
            write(settings.jobs_dir / things.job_id / "journal.jsonl", MIB)
        make_model(settings.fine_tuned_dir / "ft:tiny::ffffffffffff")  # of an unknown job

        def seen(who: str) -> set[tuple[str, str]]:
            rows: list[dict[str, Any]] = world.ask(who, "GET", "/v1/storage").json()["data"]
            return {(row["kind"], row["id"]) for row in rows}

        for who in USERS:
            things = world.things[who]
            assert seen(who) == {("job", things.job_id), ("file", things.file_id), ("model", things.model)}
        assert seen("root") >= {("model", "ft:tiny::ffffffffffff"), ("base_model", "tiny"), *seen("alice")}


@pytest.mark.parametrize("what", ["storage", "timeline", "plan", "plan/timeline"])
def test_the_data_of_another_homes_job_is_not_said_to_be_nothing(client: TestClient, file_id: str, what: str) -> None:
    job_id = client.post(JOBS, json={"model": "tiny", "training_file": file_id}).json()["id"]
    with context_of(client).database.write() as session:
        JobRepository(session).get(job_id).node = "node-elsewhere"
    response = client.get(f"{JOBS}/{job_id}/{what}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "job_elsewhere")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (300 * MIB, "0.29 GiB"),
        (5 * 1024**5, "5120.00 TiB"),
        (5000 * 1024**5, "5000.00 PiB"),
    ],
)
def test_bytes_in_words(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text
