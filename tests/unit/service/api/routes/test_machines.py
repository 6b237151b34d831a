"""Machines that plans know by name, over HTTP."""

import shutil

from fastapi.testclient import TestClient

from windlass.planner.hardware.hardware import example_machines
from windlass.planner.hardware.model_shape import published_models
from windlass.planner.hardware.named_machines import machine_of
from windlass.service.installation.settings import HARDWARE_FILE, Settings

MACHINES = "/v1/fine_tuning/machines"


def test_lists_desktops_and_published_machines(client: TestClient) -> None:
    machines = {each["id"]: each for each in client.get(MACHINES).json()["data"]}
    assert {"rtx3090", "rtx4090", "rtx5090", *example_machines()} == set(machines)
    desktop = machines["rtx4090"]
    assert desktop["hardware"] == machine_of("rtx4090").model_dump()
    assert desktop["sizes"] == {"gpus": [1, 2, 4], "ram": [64, 128, 256], "ssds": [1, 2, 3, 4]}
    assert desktop["description"].startswith("1 x NVIDIA GeForce RTX 4090 (24 GiB), 60 GiB of host memory")
    assert machines["rtx4090-server"]["sizes"] is None


def test_lists_the_shapes_that_plans_know(client: TestClient) -> None:
    shapes = {each["id"]: each for each in client.get("/v1/fine_tuning/shapes").json()["data"]}
    assert set(shapes) == set(published_models())
    llama = shapes["llama-3.1-8b"]
    assert (llama["num_params"], llama["max_sequence_length"]) == (8_030_261_248, 131_072)
    assert llama["description"] == "8.03 billion parameters, 32 layers of 4096"
    assert llama["shape"]["num_kv_heads"] == 8
    assert shapes["ratel-13b"]["max_sequence_length"] is None
    sizes = [each["num_params"] for name, each in shapes.items() if name.startswith("ratel-")]
    assert sizes == sorted(sizes)


def test_this_machine_comes_first_once_it_was_measured(client: TestClient, settings: Settings) -> None:
    assert client.get(f"{MACHINES}/measured").status_code == 404
    shutil.copy(example_machines()["memascend-1"], settings.home / HARDWARE_FILE)
    first = client.get(MACHINES).json()["data"][0]
    assert first == client.get(f"{MACHINES}/measured").json()
    assert (first["id"], first["hardware"]) == ("measured", machine_of("memascend-1").model_dump())


def test_a_desktop_has_the_sizes_of_its_name(client: TestClient) -> None:
    name = "rtx4090:gpus=2,ram=128"
    machine = client.get(f"{MACHINES}/{name}").json()
    assert (machine["id"], machine["hardware"]) == (name, machine_of(name).model_dump())


def test_a_name_that_is_written_otherwise_is_told_as_in_lists(client: TestClient) -> None:
    machine = client.get(f"{MACHINES}/RTX 4090:RAM=96").json()
    assert (machine["id"], machine["hardware"]["host"]["memory_gib"]) == ("rtx4090:ram=96", 92)
    assert machine["sizes"]["ram"] == [64, 128, 256]


def test_an_unknown_size_is_refused_with_those_that_are_known(client: TestClient) -> None:
    response = client.get(f"{MACHINES}/rtx4090:ram=500")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("machine_not_found", "machine")
    assert "ram=500 is not possible; ram may be a whole number of GiB from 16 to 256" in error["message"]
