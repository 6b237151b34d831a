"""`windlass plan --boxes`, as users run it."""

import json
import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import Result

from tests.support.service.boxes import make_facts
from tests.support.service.plan_command import JOB
from tests.support.service.plan_command import run as run_plan
from windlass.planner.hardware.hardware import Hardware, example_machines, save_hardware
from windlass.planner.hardware.yaml_files import load
from windlass.service.installation.home import node_of
from windlass.service.installation.settings import Settings
from windlass.service.validation.setting_values import MAX_BOXES
from windlass.storage.sql.database import Database
from windlass.storage.sql.repositories.boxes import HEAD_ID, BoxRepository

LLAMA = "num_layers: 4\nhidden_size: 256\nnum_heads: 4\nnum_kv_heads: 4\nvocab_size: 1000\n"
SERVER = ("--hardware", "rtx4090-server")


@pytest.fixture
def shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    path = tmp_path / "shape.yaml"
    path.write_text(LLAMA)
    return str(path)


def run(model: str, *arguments: str) -> Result:
    return run_plan("--model", model, *JOB, *arguments)


@pytest.mark.long
def test_plans_over_boxes_are_told_in_words(shape: str) -> None:
    result = run(shape, *SERVER, "--boxes", "2", "--network", "10")
    assert result.exit_code == 0, result.output
    for words in ("1 rtx4090-server", "2 rtx4090-server", "bound by", "0-5", "not measured", "windlass submit --boxes"):
        assert words in result.output


def test_plans_over_boxes_are_told_as_json(shape: str) -> None:
    result = run(shape, *SERVER, "--boxes", "2", "--network", "0.01", "--json")
    found = json.loads(result.output)
    plans = found["plans"]
    assert sorted(len(each["boxes"]) for each in plans) == [1, 2]
    assert plans[0]["step_s"] <= plans[1]["step_s"]
    two = next(each for each in plans if len(each["boxes"]) == 2)
    assert two["network_s"] == pytest.approx(two["network_gb_per_step"] / 1.25e-3)
    assert two["boxes"][-1]["last_block"] == 5
    assert two is plans[1], "so slow a network takes longer than what a second box brings"
    slower = "slower with more boxes: 2 rtx4090-server than 1 rtx4090-server: submit the job over fewer"
    assert slower in found["notes"]


@pytest.mark.long
def test_plan_over_boxes_by_a_name_on_the_hub_tells_the_shape(shape: str) -> None:
    job = ("Qwen/Qwen2.5-0.5B-Instruct", *SERVER, "--boxes", "1", "--num-microbatches", "1")
    assert run(*job).output.startswith("the model has the published shape qwen2.5-0.5b of Qwen\n")
    assert json.loads(run(*job, "--json").output)["shape"] == "qwen2.5-0.5b"


@pytest.mark.long
def test_several_kinds_of_boxes_are_planned_together(shape: str) -> None:
    kinds = (*SERVER, "--hardware", "rtx3090", "--boxes", "1", "--boxes", "1", "--network", "25")
    plans = json.loads(run(shape, *kinds, "--json").output)["plans"]
    assert sorted(sorted(box["hardware"] for box in each["boxes"]) for each in plans) == [
        ["rtx3090"],
        ["rtx3090", "rtx4090-server"],
        ["rtx4090-server"],
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--boxes", "2"), "--network: the rate between boxes is not known"),
        (("--network", "10"), "--network: one box sends nothing; add --boxes"),
        (("--hardware", "rtx3090"), "--hardware: several kinds of boxes; add --boxes"),
        (("--boxes", "2", "--boxes", "1", "--network", "10"), "--boxes: 2 numbers for 1 kinds of boxes"),
        (("--boxes", "0", "--network", "10"), "--boxes: 0 is neither a number from 1 to 16 nor names of boxes"),
        (("--boxes", str(MAX_BOXES + 1)), f"--boxes: {MAX_BOXES + 1} is neither a number from 1 to {MAX_BOXES}"),
        (("--boxes", str(MAX_BOXES), "--boxes", "1"), f"--boxes: {MAX_BOXES + 1} boxes in all; a job has at most"),
        (("--boxes", "head,", "--network", "10"), "--boxes: head, is neither a number"),
        (("--boxes", "attic,attic", "--network", "10"), "--boxes: attic,attic is neither"),
        (("--boxes", "head,attic", "--network", "10"), "--boxes: names say which machines they are"),
        (("--boxes", "2", "--network", "10", "--what-if"), "--what-if: it is about one box"),
        (("--boxes", "2", "--network", "10", "--num-examples", "9"), "--num-examples: it is about one box"),
        (("--boxes", "2", "--network", "10", "--epochs", "1"), "--epochs: it is about one box"),
        (("--boxes", "2", "--network", "10", "--find", "largest-batch"), "--find: it is about one box"),
    ],
)
def test_options_that_do_not_go_together_are_refused(shape: str, arguments: tuple[str, ...], told: str) -> None:
    result = run(shape, *SERVER, *arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


def test_more_names_of_boxes_than_a_job_may_have_are_refused(shape: str) -> None:
    names = ",".join(f"box{number}" for number in range(MAX_BOXES + 1))
    result = run(shape, "--boxes", names, "--network", "10")
    assert result.exit_code == 2
    assert f"--boxes: {MAX_BOXES + 1} boxes in all; a job has at most {MAX_BOXES}" in " ".join(result.output.split())


@pytest.mark.long
def test_measured_network_is_used_where_no_other_is_told(shape: str, tmp_path: Path, migrated_file: Path) -> None:
    home = tmp_path / "home"
    (home / "cluster").mkdir(parents=True)
    shutil.copyfile(migrated_file, home / "windlass.db")
    head = node_of(home)
    with closing(Database(Settings(home=home).database_url)) as database, database.write() as session:
        boxes = BoxRepository(session)
        box = boxes.add(name="attic", node="node-2", head=head, certificate="", address="", facts={})
        boxes.keep_rate(head, HEAD_ID, box.id, bytes_per_s=1.25e9, round_trip_s=1e-4)
        boxes.keep_rate(head, box.id, HEAD_ID, bytes_per_s=1.0e9, round_trip_s=1e-4)
        boxes.keep_rate(head, "box-gone", HEAD_ID, bytes_per_s=1.0, round_trip_s=1e-4)
    result = run(shape, *SERVER, "--boxes", "2", "--json")
    told = json.loads(result.output)
    assert (
        told["notes"][-1] == "network: 1 GB/s, the slowest that `windlass doctor --network` has measured between boxes"
    )
    two = next(each for each in told["plans"] if len(each["boxes"]) == 2)
    assert two["network_s"] == pytest.approx(two["network_gb_per_step"])


def test_boxes_that_have_joined_are_planned_by_name(shape: str, tmp_path: Path, migrated_file: Path) -> None:
    home = tmp_path / "home"
    (home / "cluster").mkdir(parents=True)
    shutil.copyfile(migrated_file, home / "windlass.db")
    head, server = node_of(home), load(Hardware, example_machines()["rtx4090-server"])
    facts = make_facts(hardware=server.model_dump(mode="json")).model_dump(mode="json")
    with closing(Database(Settings(home=home).database_url)) as database, database.write() as session:
        BoxRepository(session).add(name="attic", node="node-2", head=head, certificate="", address="", facts=facts)
    kinds = ("--hardware", "attic", "--hardware", "rtx3090", "--boxes", "1", "--boxes", "1", "--network", "10")
    result = run(shape, *kinds, "--json")
    assert result.exit_code == 0, result.output
    used = [sorted(box["hardware"] for box in plan["boxes"]) for plan in json.loads(result.output)["plans"]]
    assert ["attic", "rtx3090"] in used
    save_hardware(server, home / "hardware.yaml")
    result = run(shape, "--boxes", "head,attic", "--network", "10", "--json")
    assert result.exit_code == 0, result.output
    used = [sorted(box["hardware"] for box in plan["boxes"]) for plan in json.loads(result.output)["plans"]]
    assert sorted(used) == [["attic"], ["attic", "measured"], ["measured"]]
    result = run(shape, "--hardware", "cellar", "--boxes", "1")
    assert "'measured' is this machine, and attic is a box of it" in " ".join(result.output.split())


def test_a_job_that_fits_no_number_of_boxes_ends_with_a_code_of_its_own(shape: str, tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text(
        "gpus: {count: 1, memory_gib: 24, tflops: 100}\n"
        "host: {memory_gib: 2, memory_gb_per_s: 50, adam_params_per_s: 1.0e+9}\n"
        "pcie: {h2d_gb_per_s: 20, d2h_gb_per_s: 20}\n"
        "ssds: {count: 1, read_gb_per_s: 6, write_gb_per_s: 3, capacity_gib: 0.001}\n"
        "network_gb_per_s: 1\n"
    )
    result = run(shape, "--hardware", str(small), "--boxes", "2")
    assert result.exit_code == 3, result.output
    assert "it does not fit on any number of these boxes" in result.output
    for place in (1, 2):
        assert re.search(rf"with blocks \d to \d, box {small} {place} lacks .* of space on the SSDs", result.output)
